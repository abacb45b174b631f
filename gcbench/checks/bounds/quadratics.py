"""SGD on quadratics whose constants are all known, for the theorems on convergence.

f(w) = 1/2 sum_i L_i w_i^2, with curvatures L_i in geometric progression from 1 to 1 / condition.
Descents start from w_i = +-start with random signs; a worker's gradient has independent noise of a
given standard deviation in every coordinate. For theorems that need bounded gradients the function
is linear beyond |w_i| = 1 (Huber's function), so that |df/dw_i| <= L_i everywhere. Many independent
copies run at once: each is a tensor of one bucket, so that real codecs, with a scale for each
tensor, go through the real exchange. Parameters and exact gradients are float64, what is exchanged
is float32. Results are lists with one value for each copy; each seed gives further copies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcbench.checks import calls
from gcbench.checks.bounds.audit import lane_of
from gcbench.checks.exchanges import simulated
from gcbench.checks.oracle import energy
from gcbench.core import memory, registry
from gcbench.core.compressor import Compressor, Context, Key, Segments

ELEMENTS = 1024
"""Number of elements of all copies together, if that makes at least `LEAST` copies."""
LEAST = 16
"""The least number of copies of a seed, so that Student's t has values enough."""
PLATEAU_ELEMENTS = 2048
"""`ELEMENTS` for runs that are compared with a value, not with a bound."""
SHAPES = ((2, 2), (4, 4), (8, 8), (16, 16))
"""Shapes of one copy: matrices, for methods that work on columns or by low rank."""
Shape = tuple[int, int]
Draw = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return normal noise of variance 1, drawn in float32 and returned as float64."""
    return torch.randn(shape, generator=generator).double()


def skewed(batch: int, share: float = 0.1) -> Draw:
    """Return a function that draws skewed noise of mean 0 and variance 1.

    It is the mean of `batch` examples, times sqrt(batch). An example is 3 with probability 0.1, and
    otherwise -1/3.
    """

    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        count = torch.full(shape, float(batch), dtype=torch.float64)
        hits = torch.binomial(count, torch.full_like(count, share), generator=generator)
        return (hits - batch * share) / math.sqrt(batch * share * (1 - share))

    return draw


class Quadratic:
    """Independent copies of one quadratic, with an exchange by which N workers descend on them."""

    def __init__(
        self,
        method: Compressor,
        shape: Shape,
        *,
        condition: float,
        noise: float,
        workers: int = 1,
        carried: memory.Memory | None = None,
        seed: int = 0,
        draw: Draw = normal,
        start: float = 1.0,
        huber: bool = False,
        elements: int | None = None,
    ) -> None:
        """Start at w_i = +-start.

        `noise`: standard deviation of a worker's gradient in each coordinate, drawn by `draw`;
        `carried`: the memory; `huber`: linear beyond |w_i| = 1; `elements`: see `ELEMENTS`.
        """
        self.generator = torch.Generator().manual_seed(seed)
        self.d = math.prod(shape)
        self.copies = max(LEAST, (elements or ELEMENTS) // self.d)
        exponent = -torch.arange(self.d, dtype=torch.float64) / (self.d - 1)
        self.curvature = condition**exponent
        signs = torch.randint(2, (self.copies, self.d), generator=self.generator) * 2 - 1
        self.w = start * signs.double()
        self.method, self.noise, self.draw, self.huber = method, noise, draw, huber
        self.workers, self.seed = workers, seed
        self.law = torch.Generator().manual_seed(seed + 1_000_003)  # for `declared_step`
        self.segments = Segments.of([shape] * self.copies, method.granularity)
        self.exchange = simulated(lane_of(method, self.segments, carried), workers, seed)
        self.t = 0

    def gradient(self) -> Tensor:
        """Return the exact gradients, float64, shape (copies, d)."""
        return self.curvature * (self.w.clamp(-1, 1) if self.huber else self.w)

    def observed(self) -> list[Tensor]:
        """Return each worker's bucket of noisy gradients, float32, shape (copies * d,)."""
        exact = self.gradient()
        if not self.noise:
            return [exact.float().view(-1)] * self.workers
        return [
            (exact + self.noise * self.draw(self.generator, tuple(exact.shape))).float().view(-1)
            for _ in range(self.workers)
        ]

    def step(self, buckets: list[Tensor], lr: float) -> None:
        """Exchange the workers' buckets, and make a step of SGD with the mean."""
        arrived = self.exchange.mean(buckets, self.t, lr).double().view(self.copies, self.d)
        self.w -= lr * arrived
        self.t += 1

    def declared_step(self, buckets: Sequence[Tensor], lr: float) -> None:
        """Make a step with the method's declarations in place of its code: target plus noise.

        The noise is normal with the declared variance: of each worker's code, or, where all workers
        draw the same numbers, of the code of their mean.
        """
        method, segments, key = self.method, self.segments, Key(self.seed, self.t, 0)
        if method.draw_shared(Context(segments, key=key)) is not None:
            buckets = [torch.stack(list(buckets)).mean(0)]
        shared = calls.agree(method, buckets, segments, key)
        total = torch.zeros(self.copies * self.d, dtype=torch.float64)
        for x in buckets:
            variance = method.claims.variance(x, Context(segments, shared))
            assert variance is not None, "asked for where a variance is declared"
            spread = normal(self.law, tuple(total.shape))
            total += (
                method.claims.target(x, Context(segments, shared)).double()
                + variance.sqrt() * spread
            )
        self.w -= lr * (total / len(buckets)).view(self.copies, self.d)
        self.t += 1

    def residual(self) -> Tensor:
        """Return worker 0's residuals, float64, (copies, d)."""
        return self.exchange.workers[0][0]["residual"].double().view(self.copies, self.d)

    @property
    def lost(self) -> bool:
        """Whether the run has diverged: a parameter of 1e30 or more, or NaN."""
        return not float(self.w.abs().max()) < 1e30


def by_copy(method: Compressor) -> Compressor | None:
    """Return the method with segments no larger than a tensor, so that copies stay independent.

    None if the method has one segment for the model and no field to change that.
    """
    if method.granularity != "model":
        return method
    if "granularity" not in registry.fields(type(method)):
        return None
    return dataclasses.replace(method, granularity="tensor")  # type: ignore[type-var]


def segments_of(method: Compressor, shape: Shape) -> Segments:
    """Return the segments of a bucket with two copies."""
    return Segments.of([shape] * 2, method.granularity)


def declares_variance(method: Compressor) -> bool:
    """Return whether an unbiased method declares its variance."""
    return _variance(method, torch.ones(4), segments_of(method, (1, 2)), 0) is not None


def _variance(method: Compressor, x: Tensor, segments: Segments, seed: int) -> Tensor | None:
    """Return the variance declared for a single worker's x at step 0; None if undeclared."""
    shared = calls.agree(method, [x], segments, Key(seed, 0, 0))
    return method.claims.variance(x, Context(segments, shared))


def tight_delta(method: Compressor) -> tuple[Shape, float] | None:
    """Return the shape with the largest declared delta below .9, and that delta.

    Bounds are tight for large delta; but above .9 hardly anything is lost. If all deltas are above
    .9, the shape is 8 x 8, or the largest with a delta. None if no delta is declared.
    """
    declared = _by_shape(method, method.claims.delta)
    proper = [pair for pair in declared if pair[1] < 0.9]
    if proper:
        return max(proper, key=lambda pair: pair[1])
    return declared[min(2, len(declared) - 1)] if declared else None


def tight_omega(method: Compressor) -> tuple[Shape, float] | None:
    """Return the shape with the least declared omega above 0, and that omega; None without any."""
    declared = _by_shape(method, method.claims.omega)
    proper = [pair for pair in declared if pair[1] > 0]
    if proper:
        return min(proper, key=lambda pair: pair[1])
    return declared[-1] if declared else None


def _by_shape(
    method: Compressor, constant: Callable[[Segments], float | None]
) -> list[tuple[Shape, float]]:
    """Return the shapes for which a constant is declared, and its values."""
    values = ((shape, constant(segments_of(method, shape))) for shape in SHAPES)
    return [(shape, value) for shape, value in values if value is not None]


# ---- signSGD -------------------------------------------------------------------------------------

SIGN_SHAPE = (8, 8)


@dataclass(frozen=True)
class Signs:
    """A setting of theorems 1 and 2 of Bernstein et al. 2018."""

    workers: int
    condition: float
    k: int
    """K: the number of steps, and of examples in a batch."""
    sigma: float
    """Standard deviation of one example's gradient, in each coordinate."""
    symmetric: bool = True
    """Whether the noise is normal; else it is skewed, and the bound is that for any noise."""


def sign_bound(signs: Signs) -> float:
    """Return the bound on [E mean_k ||g_k||_1]^2, from the problem's constants alone.

    For K = k steps of size 1 / sqrt(||L||_1 K), with batches of K examples a worker, it is (1 / K)
    [sqrt(||L||_1) (f_0 - f* + 1/2) + 2 ||sigma||_1]^2; the noise term is divided by sqrt(workers)
    if the noise is unimodal and symmetric. Bernstein et al. 2018, theorems 1 and 2.
    """
    d = math.prod(SIGN_SHAPE)
    total = sum(signs.condition ** (-i / (d - 1)) for i in range(d))
    spread = 2 * signs.sigma * d / (math.sqrt(signs.workers) if signs.symmetric else 1)
    return float((math.sqrt(total) * (total / 2 + 0.5) + spread) ** 2 / signs.k)


def sign_descent(method: Compressor, signs: Signs, seed: int) -> list[float]:
    """Return mean_k ||g_k||_1 of each copy, see `sign_bound`."""
    noise = signs.sigma / math.sqrt(signs.k)
    draw = normal if signs.symmetric else skewed(signs.k)
    problem = Quadratic(
        method,
        SIGN_SHAPE,
        condition=signs.condition,
        noise=noise,
        workers=signs.workers,
        seed=seed,
        draw=draw,
    )
    lr = 1 / math.sqrt(float(problem.curvature.sum()) * signs.k)
    norms = torch.zeros(problem.copies, dtype=torch.float64)
    for _ in range(signs.k):
        norms += problem.gradient().abs().sum(1)
        problem.step(problem.observed(), lr)
    return [*(norms / signs.k).tolist()]


FLOOR_START, FLOOR_STEP, FLOOR_NOISE, FLOOR_STEPS = 0.5, 0.02, 1.0, 250


def sign_floor(method: Compressor, workers: int, seed: int) -> list[float]:
    """Return, for each copy, the mean |w_i| over the steps of a descent by majority votes.

    The gradient's noise is so large that the descent ends at a noise floor.
    """
    problem = Quadratic(
        method,
        SIGN_SHAPE,
        condition=1.0,
        noise=FLOOR_NOISE,
        workers=workers,
        seed=seed,
        start=FLOOR_START,
    )
    total = torch.zeros(problem.copies, dtype=torch.float64)
    for _ in range(FLOOR_STEPS):
        problem.step(problem.observed(), FLOOR_STEP)
        total += problem.w.abs().mean(1)
    return [*(total / FLOOR_STEPS).tolist()]


def sign_chain(workers: int) -> float:
    """Return the exact expectation of the result of `sign_floor`, for an odd number of workers.

    A coordinate is a Markov chain on start + j step. It goes down with the probability that the
    majority of the workers has a positive gradient; each has one with probability Phi(w / noise).
    """
    j = torch.arange(-FLOOR_STEPS, FLOOR_STEPS + 1, dtype=torch.float64)
    w = FLOOR_START + j * FLOOR_STEP
    p = torch.special.ndtr(w / FLOOR_NOISE)
    down = torch.zeros_like(p)
    for k in range((workers + 1) // 2, workers + 1):
        down += math.comb(workers, k) * p**k * (1 - p) ** (workers - k)
    mass = torch.zeros_like(p)
    mass[FLOOR_STEPS] = 1.0
    total = 0.0
    for _ in range(FLOOR_STEPS):
        after = torch.zeros_like(mass)
        after[:-1] += (mass * down)[1:]
        after[1:] += (mass * (1 - down))[:-1]
        mass = after
        total += float(mass @ w.abs())
    return total / FLOOR_STEPS


# ---- unbiased codes ------------------------------------------------------------------------------


def _omega(problem: Quadratic) -> float:
    """Return the declared variance over the squared norm, for a gradient that is only noise."""
    x = problem.observed()[0]
    variance = _variance(problem.method, x, problem.segments, problem.seed)
    assert variance is not None, "asked for where a variance is declared"
    return float(variance.sum()) / energy(x)


def plateau(method: Compressor, workers: int, seed: int) -> tuple[list[float], list[float]]:
    """Return the mean ||w||^2 of each copy at the plateau of SGD with a constant step, twice.

    The first is with the method. The second is of the same descent, with the same start and the
    same gradient noise, but with the declared target and variance in place of the code
    (`declared_step`). The shape is the largest up to 8 x 8 on which noise has an omega of at most
    4. With a variance of omega ||x||^2 there is a plateau only for steps below 2 / (L (1 + omega)):
    the step is a quarter of that, and at most 0.1. The mean is over 24 / step steps, after 6 / step
    steps to settle.
    """

    def make(shape: Shape) -> Quadratic:
        return Quadratic(
            method,
            shape,
            condition=2.0,
            noise=0.125,
            workers=workers,
            seed=seed,
            start=0.0,
            elements=PLATEAU_ELEMENTS,
        )

    tried = {shape: _omega(make(shape)) for shape in SHAPES[:3]}
    small = [shape for shape, omega in tried.items() if omega <= 4]
    shape = small[-1] if small else SHAPES[0]
    omega = tried[shape]
    lr = min(0.1, 0.5 / (1 + omega))
    settle, counted = round(6 / lr), round(24 / lr)
    ends = []
    for declared in (False, True):
        problem = make(shape)
        size = problem.noise * math.sqrt(lr / 2 * (1 + omega) / workers)  # near where it will end
        problem.w = size * normal(problem.generator, (problem.copies, problem.d))
        total = torch.zeros(problem.copies, dtype=torch.float64)
        for t in range(settle + counted):
            buckets = problem.observed()
            if t >= settle:
                total += problem.w.square().sum(1)
            if declared:
                problem.declared_step(buckets, lr)
            else:
                problem.step(buckets, lr)
                if problem.lost:
                    total.fill_(math.nan)
                    break
        ends.append((total / counted).tolist())
    return ends[0], ends[1]


RATE_STEPS = 400


def rate_marks() -> list[int]:
    """Return the steps, spaced logarithmically, at which a descent is compared with its bound."""
    early = {round(10 ** (k / 8)) for k in range(8, 40)}
    return sorted(early & set(range(RATE_STEPS)) | {RATE_STEPS})


def rate(method: Compressor, shape: Shape, omega: float, seed: int) -> list[list[float]]:
    """Return ||w_t - w*||^2 / its bound, for each of `rate_marks` and each copy.

    Theorem 1 of Wen et al. 2017, with steps gamma_t = a / (t + t0): E||Q(g)||^2 <= (1 + omega)
    E||g||^2 <= A + B ||w - w*||^2 with A = (1 + omega) s^2 and B = (1 + omega) L^2, s^2 being the
    variance of the noise. So E||w - w*||^2 is at most u_t, with u_0 = ||w_0 - w*||^2 and u_{t+1} =
    (1 - 2 mu gamma_t + B gamma_t^2) u_t + A gamma_t^2, which goes to 0 as 1/t.
    """
    condition, noise = 1.5, 1.0
    problem = Quadratic(method, shape, condition=condition, noise=noise, seed=seed)
    a = 1.5 * condition
    t0 = a * (1 + omega) * condition  # the first step is mu / B, at which u falls fastest
    bound = float(problem.d)
    seen, marks = [], rate_marks()
    for t in range(RATE_STEPS):
        gamma = a / (t + t0)
        problem.step(problem.observed(), gamma)
        if problem.lost:
            return [[math.nan] * problem.copies] * len(marks)
        shrunk = 1 - 2 * gamma / condition + (1 + omega) * gamma**2
        bound = shrunk * bound + (1 + omega) * noise**2 * problem.d * gamma**2
        if t + 1 in marks:
            seen.append((problem.w.square().sum(1) / bound).tolist())
    return seen


# ---- error feedback ------------------------------------------------------------------------------


FEEDBACK_CONDITION, FEEDBACK_NOISE = 1.5, 0.3


def feedback_plan(delta: float) -> tuple[float, int]:
    """Return the learning rate and the number of steps.

    The rate is so small that the error-feedback term does not dominate the bound.
    """
    lr = min(0.08, 0.08 * delta / math.sqrt(max(1e-6, 1 - delta)))
    return lr, math.ceil(4 / lr)


def feedback_bounds(shape: Shape, delta: float) -> tuple[float, float]:
    """Return theorem II's bound on mean E||grad f||^2 and lemma 3's on max E||eta e||^2.

    Karimireddy et al. 2019, with sigma^2 = sum L_i^2 + noise, which bounds E||g||^2 of Huber's
    function everywhere. Their 4 (1 - delta) / delta^2 is replaced by the sum of the geometric
    series that it bounds, (1 - delta) / (1 - sqrt(1 - delta))^2 (by Minkowski's inequality).
    """
    d, (lr, steps) = math.prod(shape), feedback_plan(delta)
    curvature = [FEEDBACK_CONDITION ** (-i / (d - 1)) for i in range(d)]
    second = sum(c**2 for c in curvature) + d * FEEDBACK_NOISE**2
    root = math.sqrt(max(0.0, 1 - delta))
    series = (root / (1 - root)) ** 2
    gap = sum(curvature) / 2
    descent = 2 * gap / (lr * steps) + lr * second + lr**2 * second * series
    return descent, lr**2 * second * series


def feedback(
    method: Compressor, shape: Shape, delta: float, seed: int
) -> tuple[list[float], list[float]]:
    """Return, for each copy, mean_t ||grad f||^2, and ||eta e||^2 at the step where it is largest.

    That step is the one where the mean over copies is largest.
    """
    lr, steps = feedback_plan(delta)
    problem = Quadratic(
        method,
        shape,
        condition=FEEDBACK_CONDITION,
        noise=FEEDBACK_NOISE,
        carried=memory.make("residual", {}),
        seed=seed,
        huber=True,
    )
    most = torch.zeros(problem.copies, dtype=torch.float64)
    squares = torch.zeros_like(most)
    for _ in range(steps):
        squares += problem.gradient().square().sum(1)
        problem.step(problem.observed(), lr)
        left = problem.residual().square().sum(1)
        if problem.lost or not left.isfinite().all():
            return [math.nan] * problem.copies, [math.nan] * problem.copies
        if left.mean() > most.mean():
            most = left
    return (squares / steps).tolist(), (lr**2 * most).tolist()


# ---- contraction without feedback ----------------------------------------------------------------


@dataclass(frozen=True)
class Biased:
    """A descent by compressed gradients without feedback: its constants, and its bound."""

    workers: int
    noise: float
    errors: tuple[float, ...]
    """a_t = sqrt(1 - delta_t), by step."""
    rates: tuple[float, ...]
    d: int
    condition: float = 1.5

    @property
    def gap(self) -> float:
        """f_0 - f*."""
        return math.fsum(self.condition ** (-i / (self.d - 1)) for i in range(self.d)) / 2

    def weighted(self) -> tuple[list[float], float]:
        """Return weights w_t, and a bound on sum_t w_t E||grad f_t||^2, L = 1.

        Let v' = v + e be what arrives, v the mean of N gradients with total noise variance s^2 / N.
        By Jensen's inequality E||e||^2 <= a^2 (||grad f||^2 + s^2), without an assumption on the
        error of the mean. With 2 ||grad f|| ||e|| <= a ||grad f||^2 + ||e||^2 / a smoothness gives
        E f_{t+1} <= f_t - (w_t / 2) ||grad f||^2 + (eta / 2) a s^2 + (eta^2 / 2) (1 + a)
        (1 / N + a) s^2 with w_t = 2 eta (1 - a) - eta^2 (1 + a)^2, for w_t > 0. These are theorems
        3.4 and, where a falls to 0 with eta, 3.5 of Wang et al. 2020.
        """
        s2 = self.noise**2 * self.d
        weights, total = [], 2 * self.gap
        for a, eta in zip(self.errors, self.rates, strict=True):
            weights.append(2 * eta * (1 - a) - eta**2 * (1 + a) ** 2)
            total += eta * a * s2 + eta**2 * (1 + a) * (1 / self.workers + a) * s2
        return weights, total

    def bound(self) -> float:
        """Return a bound on mean_t E||grad f_t||^2 for a constant step of at most 1 / L, L = 1.

        The lesser of the bound of `weighted` and of another one: f_{t+1} <= f_t - (eta / 2)
        ||grad f||^2 + (eta / 2) ||v' - grad f||^2, with E||v' - grad f||^2 <= (1 + 1 / c) s^2 / N +
        (1 + c) a^2 (||grad f||^2 + s^2) for any c > 0. Without noise it is
        2 (f_0 - f*) / (eta (1 - a^2) T).
        """
        a, eta, steps = self.errors[0], self.rates[0], len(self.rates)
        s2 = self.noise**2 * self.d
        bounds = []
        weights, total = self.weighted()
        if weights[0] > 0:
            bounds.append(total / sum(weights))
        for c in [1e-9, *(2.0**k for k in range(-12, 6))]:
            left = 1 - (1 + c) * a**2
            if left > 0 and (s2 or c == 1e-9):
                added = (1 + 1 / c) * s2 / self.workers + (1 + c) * a**2 * s2
                bounds.append((2 * self.gap / (eta * steps) + added) / left)
        return min(bounds)


def biased_plan(shape: Shape, delta: float, workers: int, noise: float) -> Biased:
    """Return the descent with the constant step, of those up to 1 / L, that has the least bound."""
    a = math.sqrt(max(0.0, 1 - delta))
    steps = min(600, math.ceil(3 / delta) + 2)
    plans = [
        Biased(workers, noise, (a,) * steps, (2.0**-k,) * steps, math.prod(shape)) for k in range(7)
    ]
    return min(plans, key=Biased.bound)


def falling_plan(method: Compressor, shape: Shape) -> tuple[Biased, list[Compressor]]:
    """Return a descent whose steps and errors fall together, and the method for each step."""
    rates = [0.2 / (1 + t / 50) for t in range(200)]
    methods = []
    errors = []
    for eta in rates:
        now = method.claims.with_error(math.sqrt(eta))
        assert now is not None, "asked for where an error can be set"
        delta = now.claims.delta(segments_of(now, shape))
        if delta is None:
            raise ValueError(f"{now!r} was given as one with an error, and declares no delta")
        methods.append(now)
        errors.append(math.sqrt(max(0.0, 1 - delta)))
    return Biased(4, 0.25, tuple(errors), tuple(rates), math.prod(shape)), methods


def biased(
    methods: Sequence[Compressor], shape: Shape, plan: Biased, weights: Sequence[float], seed: int
) -> list[float]:
    """Return the weighted mean of ||grad f_t||^2 of each copy.

    `methods` has one method for each step, or a single one for all.
    """
    problem = Quadratic(
        methods[0],
        shape,
        condition=plan.condition,
        noise=plan.noise,
        workers=plan.workers,
        seed=seed,
    )
    squares = torch.zeros(problem.copies, dtype=torch.float64)
    for t, (eta, weight) in enumerate(zip(plan.rates, weights, strict=True)):
        if len(methods) > 1:
            problem.exchange.change([lane_of(methods[t], problem.segments)])
        squares += weight * problem.gradient().square().sum(1)
        problem.step(problem.observed(), eta)
        if problem.lost:
            return [math.nan] * problem.copies
    return [*(squares / sum(weights)).tolist()]
