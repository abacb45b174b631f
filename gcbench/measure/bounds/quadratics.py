"""The theorems themselves, on bowls where every constant is known.

f(w) = 1/2 sum_i L_i w_i^2 with curvatures that fall in equal ratios from 1 to 1 / condition, from
w = +-1, the signs drawn; the gradient of an example has independent noise of variance 1 in every
coordinate. `COPIES` independent copies run at once: each is a tensor of one bucket, so that real
codecs, with their scales a tensor, go through the real exchange, and a wrong encoder or decoder
breaks the claim. Points and exact gradients are float64, what is exchanged is float32. Intervals
are over the copies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gcbench import memory
from gcbench.compressor import Compressor, Key, Segments
from gcbench.measure.bounds.alone import agreed, energy, lane_of, single
from gcbench.measure.bounds.claims import Interval, interval
from gcbench.world import Link, SimulatedWorld

SHAPE = (16, 16)
"""Of one copy: a matrix, so that columns and low ranks mean something."""
DIMENSION = math.prod(SHAPE)
COPIES = 32
Draw = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return normal noise of variance 1, float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def skewed(batch: int, share: float = 0.1) -> Draw:
    """Return noise of variance 1 that is the mean of `batch` two-valued examples, times sqrt batch.

    An example is 3 with probability 0.1, else -1/3: mean 0, variance 1, most of it on one side.
    """

    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        count = torch.full(shape, float(batch), dtype=torch.float64)
        hits = torch.binomial(count, torch.full_like(count, share), generator=generator)
        return (hits - batch * share) / math.sqrt(batch * share * (1 - share))

    return draw


class Bowl:
    """`COPIES` copies of one bowl, and the workers that descend them."""

    def __init__(
        self,
        method: Compressor,
        *,
        condition: float,
        noise: float,
        workers: int = 1,
        kept: memory.Memory | None = None,
        seed: int = 0,
        draw: Draw = normal,
    ) -> None:
        """Start at +-1; `noise` is the standard deviation of a worker's gradient, a coordinate."""
        self.generator = torch.Generator().manual_seed(seed)
        exponent = -torch.arange(DIMENSION, dtype=torch.float64) / (DIMENSION - 1)
        self.curvature = condition**exponent
        signs = torch.randint(2, (COPIES, DIMENSION), generator=self.generator) * 2 - 1
        self.w = signs.double()
        self.method, self.noise, self.draw = method, noise, draw
        world = SimulatedWorld(workers, torch.device("cpu"), Link(10.0, 50.0), 1, 1)
        self.segments = Segments.of([SHAPE] * COPIES, method.granularity)
        self.exchange = single(seed, world.device, lane_of(method, self.segments, kept), world)
        self.t = 0

    @property
    def gap(self) -> float:
        """f(w_0) - f*, the same for every copy."""
        return float(self.curvature.sum()) / 2

    def gradient(self) -> Tensor:
        """Return the exact gradients, float64, shape (COPIES, DIMENSION)."""
        return self.curvature * self.w

    def observed(self) -> list[Tensor]:
        """Return each worker's bucket of noisy gradients, float32, shape (COPIES * DIMENSION,)."""
        exact = self.gradient()
        return [
            (exact + self.noise * self.draw(self.generator, tuple(exact.shape))).float().view(-1)
            for _ in range(self.exchange.world.size)
        ]

    def step(self, buckets: list[Tensor], lr: float) -> Tensor:
        """Exchange and descend; return the mean that arrived, float64, (COPIES, DIMENSION)."""
        arrived = self.exchange.mean(buckets, self.t, lr).double().view(COPIES, DIMENSION)
        self.w -= lr * arrived
        self.t += 1
        return arrived

    def residual(self) -> Tensor:
        """Return worker 0's residuals, float64, (COPIES, DIMENSION)."""
        return self.exchange.workers[0][0]["residual"].double().view(COPIES, DIMENSION)


def by_copy(method: Compressor) -> Compressor | None:
    """Return the method with scales a tensor at most, so that copies do not meet; None if fixed."""
    if method.granularity != "model":
        return method
    fields = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    if "granularity" not in fields:
        return None
    return dataclasses.replace(method, granularity="tensor")  # type: ignore[type-var]


# ---- signSGD -------------------------------------------------------------------------------------


def sign_theorem(
    method: Compressor, workers: int, condition: float, k: int, *, symmetric: bool, seed: int = 0
) -> tuple[Interval, float]:
    """Return [E mean_k ||g_k||_1]^2 and its bound, theorems 1 and 2 of Bernstein et al. 2018.

    K = k steps of delta = 1 / sqrt(||L||_1 K) with batches of K examples a worker:
    (1 / K) [sqrt(||L||_1) (f_0 - f* + 1/2) + 2 ||sigma||_1]^2, the noise term over sqrt(workers)
    where it is unimodal and symmetric. `symmetric` is normal noise; else it is skewed, with the
    bound of any noise.
    """
    draw = normal if symmetric else skewed(k)
    bowl = Bowl(
        method, condition=condition, noise=1 / math.sqrt(k), workers=workers, seed=seed, draw=draw
    )
    total = float(bowl.curvature.sum())
    lr = 1 / math.sqrt(total * k)
    norms = torch.zeros(COPIES, dtype=torch.float64)
    for _ in range(k):
        norms += bowl.gradient().abs().sum(1)
        bowl.step(bowl.observed(), lr)
    found = interval((norms / k).tolist(), "copies").squared()
    spread = 2 * DIMENSION / (math.sqrt(workers) if symmetric else 1)
    return found, (math.sqrt(total) * (bowl.gap + 0.5) + spread) ** 2 / k


# ---- error feedback ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback:
    """What one descent with error feedback showed."""

    gradient: Interval
    """Mean over steps of ||grad f||^2."""
    gradient_bound: float
    residual: Interval
    """The largest over steps of the copies' mean ||eta e||^2, of that step."""
    residual_bound: float
    delta: float


def feedback(
    method: Compressor, *, lr: float = 0.05, steps: int = 400, batch: int = 16, seed: int = 0
) -> Feedback:
    """Descend with error feedback: lemma 3 and theorem II of Karimireddy et al. 2019.

    sigma^2 >= E||g||^2 is the largest ||grad f||^2 of any copy and step, plus the noise; delta the
    least that any copy saw at any step.
    """
    kept = memory.make("residual", method.memory_options)
    noise = 1 / math.sqrt(batch)
    bowl = Bowl(method, condition=10.0, noise=noise, kept=kept, seed=seed)
    delta, largest, most = 1.0, 0.0, torch.zeros(COPIES, dtype=torch.float64)
    squares = torch.zeros_like(most)
    for _ in range(steps):
        exact = bowl.gradient().square().sum(1)
        squares += exact
        largest = max(largest, float(exact.max()))
        buckets = bowl.observed()
        offered = buckets[0].double().view(COPIES, -1) + bowl.residual()
        bowl.step(buckets, lr)
        left = bowl.residual().square().sum(1)
        delta = min(delta, float((1 - left / offered.square().sum(1)).min()))
        if not math.isfinite(largest) or math.isnan(delta):
            break
        if left.mean() > most.mean():
            most = left
    second = largest + noise**2 * DIMENSION
    lost = (1 - delta) / delta**2 if delta > 0 else math.inf
    bound = 2 * bowl.gap / (lr * steps) + lr * second + 4 * lr**2 * second * lost
    return Feedback(
        interval((squares / steps).tolist(), "copies"),
        bound,
        interval((lr**2 * most).tolist(), "copies"),
        4 * lost * lr**2 * second,
        delta,
    )


# ---- FFT -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relative:
    """What one descent with a relative error showed."""

    gradient: Interval
    """Mean over steps, weighted by eta (1 - a), of ||grad f||^2."""
    bound: float
    excess: float
    """The largest ||v' - v|| / ||v|| over the a that the bound is for; above 1 there is none."""
    worst: float


def relative(
    method: Compressor,
    theta: Callable[[int], float],
    rate: Callable[[int], float],
    *,
    workers: int,
    steps: int = 400,
    batch: int = 16,
    seed: int = 0,
) -> Relative:
    """Descend by v' with ||v' - v|| <= a_t ||v||, a_t = sqrt(theta_t): theorems 3.4 and 3.5.

    In the form that is proved: with steps eta_t <= (1 - a_t) / (L (1 + a_t)^2), the mean of
    E||grad f||^2 with weights eta_t (1 - a_t) is at most [2 (f_0 - f*) + s^2 sum_t eta_t (a_t + L
    eta_t (1 + a_t)^2)] / sum_t eta_t (1 - a_t), s^2 = E||v - grad f||^2 of the workers' mean v. By
    smoothness, ||v'|| <= (1 + a) ||v|| and 2 ||grad f|| a ||v|| <= a (||grad f||^2 + ||v||^2). For
    constant a and eta, 2 (f_0 - f*) / (eta (1 - a) T) + s^2 (a + L eta (1 + a)^2) / (1 - a).
    """
    noise = 1 / math.sqrt(batch)
    bowl = Bowl(method, condition=10.0, noise=noise, workers=workers, seed=seed)
    variance = noise**2 * DIMENSION / workers
    weights = spent = excess = worst = 0.0
    squares = torch.zeros(COPIES, dtype=torch.float64)
    for t in range(steps):
        a, lr = math.sqrt(theta(t)), rate(t)
        now = dataclasses.replace(method, theta=theta(t))  # type: ignore[type-var]
        bowl.exchange.change([lane_of(now, bowl.segments)])
        weight = lr * (1 - a)
        squares += weight * bowl.gradient().square().sum(1)
        weights += weight
        spent += lr * (a + lr * (1 + a) ** 2)
        buckets = bowl.observed()
        mean = torch.stack([bucket.double() for bucket in buckets]).mean(0).view(COPIES, -1)
        arrived = bowl.step(buckets, lr)
        ratio = float(((arrived - mean).norm(dim=1) / mean.norm(dim=1)).max())
        worst, excess = max(worst, ratio), max(excess, ratio / a)
    found = interval((squares / weights).tolist(), "copies")
    return Relative(found, (2 * bowl.gap + variance * spent) / weights, excess, worst)


# ---- TernGrad ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convergence:
    """What one descent with steps a / (t + t0) showed."""

    worst: float
    """The largest over steps of E||w - w*||^2, its upper limit, over the proved bound."""
    steps: int
    last: Interval
    """E||w - w*||^2 at the end over that at the start."""
    last_bound: float
    slope: Interval
    """Of log ||w - w*||^2 against log t over the last nine tenths, by copy."""


def convergence(
    method: Compressor, *, steps: int = 5000, batch: int = 1, seed: int = 0
) -> Convergence:
    """Descend by gamma_t = a / (t + t0): theorem 1 of Wen et al. 2017, with its constants.

    E||g'||^2 = E||g||_inf ||g||_1 <= sqrt(d) E||g||^2 <= A + B ||w - w*||^2 with A = sqrt(d) s^2,
    s^2 the noise, and B = sqrt(d) L^2; so E||w - w*||^2 stays below u_t, u_0 = ||w_0 - w*||^2 and
    u_{t+1} = (1 - 2 mu gamma_t + B gamma_t^2) u_t + A gamma_t^2, which goes to 0 as 1/t.
    """
    condition = 2.0
    noise = 1 / math.sqrt(batch)
    bowl = Bowl(method, condition=condition, noise=noise, seed=seed)
    a, root = 1.5 * condition, math.sqrt(DIMENSION)
    t0 = a * root * condition  # the first step is mu / B, at which u falls fastest
    bound = float(DIMENSION)
    added, grown = root * noise**2 * DIMENSION, root
    marks = sorted({round(10 ** (k / 20)) for k in range(20, 20 * 6)} & set(range(steps + 1)))
    worst, path = 0.0, []
    for t in range(steps):
        gamma = a / (t + t0)
        bowl.step(bowl.observed(), gamma)
        bound = (1 - 2 * gamma / condition + grown * gamma**2) * bound + added * gamma**2
        if t + 1 in marks or t + 1 == steps:
            away = bowl.w.square().sum(1)
            path.append((t + 1 + t0, away))
            upper = interval(away.tolist(), "copies").high
            worst = max(worst, upper / bound) if math.isfinite(upper) else math.nan
            if math.isnan(worst):
                break
    last = [value / DIMENSION for value in path[-1][1].tolist()]
    late = [(math.log(at), away) for at, away in path if at - t0 >= steps / 10]
    x = torch.tensor([at for at, _ in late], dtype=torch.float64)
    y = torch.stack([away.log() for _, away in late])
    slope = ((x - x.mean())[:, None] * y).sum(0) / (x - x.mean()).square().sum()
    return Convergence(
        worst,
        len(path),
        interval(last, "copies"),
        bound / DIMENSION,
        interval(slope.tolist(), "copies"),
    )


# ---- plateaus ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plateau:
    """Where a constant step ends."""

    measured: Interval
    """E||w - w*||^2 over the prediction."""
    over_sgd: Interval
    """E||w - w*||^2 over that of SGD, which is exact."""


def _declared(bowl: Bowl, x: Tensor, key: Key) -> Tensor | None:
    """Return the declared variance of a bucket, (COPIES, DIMENSION); None if not about x itself."""
    method, segments = bowl.method, bowl.segments
    shared = agreed(method, x, segments, key)
    variance = method.variance(x, segments, shared)
    if variance is None or not torch.equal(method.target(x, segments, shared), x):
        return None
    return variance.view(COPIES, DIMENSION)


def plateau(method: Compressor, *, batch: int = 64, seed: int = 0) -> Plateau | None:
    """Descend by a constant step, and predict the plateau from the declared variance.

    An unbiased code adds noise of mean 0, given the past, so coordinate i has the stationary
    variance gamma V_i / (L_i (2 - gamma L_i)), V_i the mean total variance of what arrives: the
    noise plus E of the declared variance. For SGD V_i is the noise. A variance of omega ||x||^2
    leaves a plateau only below steps of 2 / (L (1 + omega)): gamma is 0.1, or a quarter of that.
    The first fifth of the steps is not counted; they are 30 times what the flattest direction
    needs. None: the method declares no variance, or is unbiased for something else than x.
    """
    noise, condition = 1 / math.sqrt(batch), 2.0
    bowl = Bowl(method, condition=condition, noise=noise, seed=seed)
    first = bowl.observed()[0]
    omega = _declared(bowl, first, Key(seed, 0, 0))
    if omega is None:
        return None
    spread = 1 + float(omega.sum()) / energy(first)
    lr = min(0.1, 0.5 / spread)
    steps = max(2000, round(30 * condition / lr))
    bowl.w *= noise * math.sqrt(lr / 2 * spread)  # near where it will end
    squares = torch.zeros(COPIES, DIMENSION, dtype=torch.float64)
    added = torch.zeros(DIMENSION, dtype=torch.float64)
    settle = steps // 5
    for t in range(steps):
        buckets = bowl.observed()
        if t >= settle:
            squares += bowl.w.square()
            variance = _declared(bowl, buckets[0], Key(seed, t, 0))
            if variance is None:
                return None
            added += variance.mean(0)
        bowl.step(buckets, lr)
    counted = steps - settle
    gain = lr / (bowl.curvature * (2 - lr * bowl.curvature))
    predicted = float((gain * (noise**2 + added / counted)).sum())
    plain = float(gain.sum()) * noise**2
    ends = squares.sum(1) / counted
    return Plateau(
        interval((ends / predicted).tolist(), "copies"),
        interval((ends / plain).tolist(), "copies"),
    )
