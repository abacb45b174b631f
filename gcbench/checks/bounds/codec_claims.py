"""Claims about a method's code, judged by audits of exchanges, on known inputs and in training.

Which claims apply to a method follows from its declarations: `unbiased` (with `variance` and
`variance_bound`), `contractive` (with `delta` and `error_bound`), `gaussian_error`, `signs`, and a
residual memory. They also apply to a class that inherits the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcbench.checks import calls
from gcbench.checks.bounds.audit import (
    AGAIN,
    DIRECTIONS,
    Audited,
    Record,
    again,
    directions,
    lane_of,
    merged,
)
from gcbench.checks.bounds.claims import Claim, MethodVerdicts, Unit
from gcbench.checks.exchanges import simulated
from gcbench.checks.oracle import energy
from gcbench.core import memory, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Context, Key, MultiRoundCompressor, Segments
from gcbench.core.world import Link, SimulatedWorld
from gcbench.stats.confidence import (
    ERROR,
    STRICT,
    Interval,
    always,
    bernstein,
    bounded,
    interval,
    magnitude,
    number,
    worst,
)

PLACE = "known inputs"
CARD = "the method's card"
BERNSTEIN = "Bernstein et al. 2018"
SHAPES = ((32, 128), (33,), (4, 2, 3, 3))
"""Shapes of the known inputs: a matrix of long columns, a vector, a small kernel."""
WORKERS = (1, 4)
FEW, LEAST, MOST = 6, 48, 1200
"""Steps on known inputs: of deterministic codes; of random ones at least and at most."""
BIAS, SPREAD = 0.05, 0.05
"""Relative bias, and relative deviation of a variance, that the tests must be able to detect."""
NORMAL = 0.05
"""Relative deviation that is allowed from a closed form, which is for long segments."""
ROUNDING = 1e-5
"""Relative error of float32 sums of thousands of values."""
WRONG = 0.02
"""Deviation of the probability of a wrong vote that the tests must be able to detect."""
STRENGTHS = (0.1, 0.25, 0.5, 1.0, 2.0)
"""|g| / sigma of the elements whose signs are voted on."""
GAUSS = STRENGTHS[:3]
"""The strengths at which uniform noise attains Gauss' bound, so that an excess would be seen."""
VOTES = 100_000
"""Number of elements of each strength, for each seed; half of them have a positive mean."""
VOTERS = (1, 2, 3, 4, 7)
"""Numbers of workers that vote, even ones for their ties."""


CONTRACT = Claim(
    "contract",
    "the method decodes its own payloads, no further from the target than its levels, and the "
    "target points where x does",
    CARD,
    equality=True,
)
UNBIASED = Claim(
    "unbiased",
    "E of what arrives is the declared target t: relative deviation along t, sign(t), large t",
    CARD,
    equality=True,
)
VARIANCE = Claim(
    "variance",
    "E||what arrives - t||^2 is the declared variance, over M for M workers that draw apart",
    CARD,
    equality=True,
)
VARIANCE_BOUND = Claim(
    "variance-bound",
    "E||Q(x) - x||^2 / the source's bound on it (QSGD: min(d / s^2, sqrt(d) / s) ||x||^2)",
    f"{CARD}; Alistarh et al. 2017, theorem 3.2",
)
CONTRACTION = Claim(
    "contraction",
    "||x - C(x)||^2 / ((1 - delta) ||x||^2), delta as declared for every x (top-k: k/d)",
    f"{CARD}; Stich et al. 2018, lemma A.1",
)
ERROR_BOUND = Claim(
    "error-bound",
    "||x - C(x)||^2 / the bound that is declared for this x (scaled sign: (1 - phi) ||x||^2)",
    CARD,
)
NORMAL_LOSS = Claim(
    "normal-loss",
    "||x - C(x)||^2 / ||x||^2 of normal values: relative deviation from the closed form",
    CARD,
    equality=True,
)
IDENTITY = Claim(
    "identity",
    "virtual iterate: what arrives + mean e_{t+1} - mean (decay e_t + g_t), relative, is 0",
    "Karimireddy et al. 2019, section 4; Seide et al. 2014",
    equality=True,
)
RESIDUAL = Claim(
    "residual",
    "||e_t|| / sum_s (1 - delta)^((t - s + 1) / 2) ||g_s||, decay and learning rate included",
    "Karimireddy et al. 2019, proof of lemma 3",
)
SIGN = Claim(
    "sign",
    "share of elements where what arrives is not the majority of the workers' signs",
    f"{BERNSTEIN}, algorithms 1 and 3",
    equality=True,
)
APPLIED = Claim(
    "applied",
    "share of elements where what arrives is not the declared aggregate of what was sent",
    CARD,
    equality=True,
)
VOTE = Claim(
    "vote",
    "normal noise, |g| / sigma from .1 to 2, g > 0 and g < 0: P[vote wrong] less that of M "
    "independent voters, with ties as declared",
    f"{BERNSTEIN}, section 3.3; the binomial distribution",
    equality=True,
)
VOTE_BOUND = Claim(
    "vote-bound",
    "P[sign wrong] / Gauss' 1/2 - S / (2 sqrt 3) for one worker with uniform noise, / (1 / "
    "(sqrt(M) S)) for M with normal noise; S = |g| / sigma",
    f"{BERNSTEIN}, lemma D.1 and proof of theorem 2b",
)
ALPHA = Claim(
    "alpha",
    "||v' - v|| / ||v|| of the workers' mean v, at every step, / sqrt(1 - delta)",
    "Wang et al. 2020, assumption 3.2",
    kind="assumption",
)

MOMENTS = (UNBIASED, VARIANCE, VARIANCE_BOUND)
AUDITED = (CONTRACT, *MOMENTS, CONTRACTION, ERROR_BOUND, IDENTITY, RESIDUAL, SIGN, APPLIED, ALPHA)
OF_METHODS = (*AUDITED, NORMAL_LOSS, VOTE, VOTE_BOUND)
"""What is claimed of every method: `Claim.of` names the method."""


def memory_of(method: Compressor) -> memory.Memory:
    """Return the method's own memory if that is a residual, which an audit can check; else none."""
    carried = memory.of(method)
    return carried if isinstance(carried, registry.memory_class("residual")) else memory.Memory()


# ---- verdicts on an audit ------------------------------------------------------------------------


def judge(record: Record, verdicts: MethodVerdicts, setting: str, *, alone: bool = False) -> None:
    """Judge the record of an audit of a method; `alone`: it was made on known inputs."""
    add = partial(verdicts.add, setting=setting)
    if "refused" in record:
        verdicts.refused(CONTRACT, setting, record["refused"])
    if not record["steps"]:
        return
    if "bias" in record:
        _moments(record, add, alone=alone)
    for claim, name in ((CONTRACTION, "by_delta"), (ERROR_BOUND, "by_bound")):
        if record.get(name):
            values = [*map(number, record[name])]
            add(claim, bounded(values, "steps") if record["random"] else worst(values), 1.0)
    for claim, name, bound in ((IDENTITY, "identity", ROUNDING), (RESIDUAL, "residual", 1.0)):
        if name in record:
            add(claim, always(number(record[name]), record["steps"]), bound)
    for claim, wrong, tried in ((SIGN, "wrong", "checked"), (APPLIED, "unlike", "compared")):
        if record.get(tried):
            add(claim, always(record[wrong] / record[tried], record[tried]), 0.0)
    # The assumption is about every step, so not about methods that contract in expectation only;
    # and a code that loses nothing has no error to compare.
    applies = not record["random"] and record.get("limit", 0.0) > ROUNDING
    if record.get("alpha") and record["workers"] > 1 and applies and not alone:
        values = [*map(number, record["alpha"])]
        why = f"mean {sum(values) / len(values):.3f}"
        add(ALPHA, worst(values), record["limit"], why=why)


def _moments(record: Record, add: Callable[..., None], *, alone: bool) -> None:
    """Judge bias and variance.

    Where a variance and two levels are declared intervals are by Bernstein's inequality, else by
    Student's t over steps. So is that of the variance on known inputs, whose steps are identically
    distributed sums over thousands of elements.
    """
    bias, spread, steps = record["bias"], record["spread"], record["steps"]
    deviations = []
    for k in range(DIRECTIONS):
        total, scale = number(bias["sum"][k]), number(bias["scale"][k])
        if not scale:
            continue
        if record["levels"]:
            variance_and_largest = number(bias["variance"][k]), number(bias["largest"][k])
            half = bernstein(*variance_and_largest, ERROR / DIRECTIONS)
        else:
            seen = interval([*map(number, bias["each"][k])], "steps", 1 - ERROR / DIRECTIONS)
            total, half = seen.mean * steps, (seen.high - seen.mean) * steps
        deviations.append(magnitude(total / scale, half / scale, steps, "steps", ROUNDING))
    if deviations:
        largest = max(deviations, key=_excess)
        why = f"{largest.high - largest.mean:.2%} would be seen"
        add(UNBIASED, largest, BIAS, why=why)
    if not record["exact"]:
        return
    declared, error = number(spread["declared"]), number(spread["error"])
    if not declared:
        scale = number(bias["scale"][0])
        relative = always(error / scale if scale else error, steps)
        add(VARIANCE, relative, ROUNDING**2, why="declared to be exact")
        return
    if alone or not record["levels"]:
        seen = interval([*map(number, record["excess"])], "steps", STRICT)
        half = (seen.high - seen.mean) * steps / declared
    else:
        half = bernstein(number(spread["variance"]), number(spread["largest"]), ERROR) / declared
    apart = magnitude(error / declared - 1, half, steps, "steps", ROUNDING)
    add(VARIANCE, apart, SPREAD, why=f"{half:.2%} would be seen")
    if record["bounded"] and spread["bound"]:
        ratio, width = error / spread["bound"], half * declared / spread["bound"]
        seen = Interval(ratio, ratio - width, ratio + width, steps, "steps")
        add(VARIANCE_BOUND, seen, 1.0)


def _excess(deviation: Interval) -> float:
    """Return a deviation over the half width of its interval; infinity for NaN."""
    half = deviation.high - deviation.mean
    if math.isnan(deviation.mean):
        return math.inf
    return deviation.mean / half if half else deviation.mean


# ---- known inputs --------------------------------------------------------------------------------


def normal(generator: torch.Generator, n: int) -> Tensor:
    """Return normal values, float32, shape (n,)."""
    return torch.randn(n, generator=generator)


def equal(generator: torch.Generator, n: int) -> Tensor:
    """Return +1 and -1 at random: the input on which top-k loses most."""
    return torch.randint(2, (n,), generator=generator).float() * 2 - 1


def spike(generator: torch.Generator, n: int) -> Tensor:
    """Return one large element among normal ones of 1e-3: the worst for signs, flat for the FFT."""
    x = 1e-3 * torch.randn(n, generator=generator)
    x[int(torch.randint(min(n, SHAPES[0][0] * SHAPES[0][1]), (1,), generator=generator))] = 1.0
    return x


def steps_apart(generator: torch.Generator, n: int) -> Tensor:
    """Return 1 in every 256th place, .99 / 254 elsewhere, random signs: int8 rounds these to 0."""
    x = equal(generator, n) * 0.99 / 254
    x[::256] = 1.0
    return x


INPUTS = {"normal": normal, "equal": equal, "spike": spike, "steps": steps_apart}


def exchange(method: Compressor, workers: int, carried: memory.Memory, seed: int) -> Audited:
    """Return an audited exchange of one lane, with tensors of `SHAPES`."""
    lane = lane_of(method, Segments.of(SHAPES, method.granularity), carried)
    world = SimulatedWorld(workers, torch.device("cpu"), Link(10.0, 50.0), 1, 1)
    return Audited(world, lane, seed, Clock(world.device))


def observed(
    method: Compressor,
    workers: int,
    kind: str,
    seed: int,
    steps: int,
    carried: memory.Memory,
    *,
    apart: bool = True,
    fresh: bool = False,
) -> Record:
    """Return the audit's record of `steps` steps on inputs of this `kind`, a key of `INPUTS`.

    All workers get the same vector; with `apart` each adds noise of its own, 0.1 times normal. With
    `fresh` residuals are cleared before each step.
    """
    generator = torch.Generator().manual_seed(seed)
    audited = exchange(method, workers, carried, seed)
    n = audited.lanes[0].segments.numel
    for step in range(steps):
        x = INPUTS[kind](generator, n)
        gradients = [
            x + 0.1 * torch.randn(n, generator=generator) if workers > 1 and apart else x
            for _ in range(workers)
        ]
        if fresh:
            for worker in audited.workers:
                worker[0]["residual"].zero_()
        audited.mean(gradients, step)
    return audited.audit.record()


def asked(method: Compressor, workers: int) -> int:
    """Return how many steps are needed, by the declared variance, to detect a bias of `BIAS`.

    By Bernstein's inequality on normal values, with an allowance for differences between steps; at
    least `LEAST`, at most `MOST`.
    """
    segments, key = Segments.of(SHAPES, method.granularity), Key(0, 0, 0)
    x = normal(torch.Generator().manual_seed(0), segments.numel)
    if not method.claims.unbiased:
        return LEAST if calls.is_random(method, x, segments) else FEW
    shared = calls.agree(method, [x], segments, key)
    v = method.claims.variance(x, Context(segments, shared))
    if v is None:
        return 4 * LEAST
    t = method.claims.target(x, Context(segments, shared)).double()
    apart = 1 if method.draw_shared(Context(segments, key=key)) is not None else workers
    log = 2 * math.log(2 * DIRECTIONS / ERROR)
    needed = [
        log * float(u.square() @ v) / apart / (BIAS * float(u @ t)) ** 2 for u in directions(t)
    ]
    return min(MOST, max(LEAST, math.ceil(1.3 * max(needed))))


def units(methods: Mapping[str, Compressor], seeds: Sequence[int]) -> Iterator[Unit]:
    """Yield all work on known inputs."""
    claims = (*AUDITED, NORMAL_LOSS)
    for word, method in methods.items():
        for workers in WORKERS:
            work = partial(_inputs, method, workers, seeds)
            yield Unit(f"inputs {word} M={workers}", word, PLACE, claims, work)
        work = partial(_votes, method, seeds)
        yield Unit(f"votes {word}", word, PLACE, (VOTE, VOTE_BOUND), work)


def _inputs(
    method: Compressor, workers: int, seeds: Sequence[int], verdicts: MethodVerdicts
) -> None:
    """Judge the audits: moments on normal values, contraction on the worst of all inputs."""
    label = f"M={workers}"
    carried = memory_of(method)
    steps = max(3, math.ceil(asked(method, workers) / len(seeds)))
    if any(map(verdicts.wanted, AUDITED)):
        audits = [observed(method, workers, "normal", seed, steps, carried) for seed in seeds]
        total = merged(audits)
        shown = {name: value for name, value in total.items() if not name.startswith("by_")}
        judge(shown, verdicts, f"normal, {label}", alone=True)
        singly = _contractions(method, workers, seeds)
        for name in ("by_delta", "by_bound"):
            measured = {kind: one for kind, one in singly.items() if one.get(name)}
            if measured:
                kind = max(measured, key=lambda kind: _mean(measured[kind][name]))
                only = {
                    field: measured[kind][field] for field in ("steps", "workers", "random", name)
                }
                judge(only, verdicts, f"{kind}, {label}", alone=True)
        if workers == 1:
            _absent(method, total, singly, verdicts)
    if workers == 1 and verdicts.wanted(NORMAL_LOSS):
        _normal_loss(method, seeds, verdicts)


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean; infinity if a value is None, which stands for one that is not finite."""
    numbers = [math.inf if value is None else value for value in values]
    return sum(numbers) / len(numbers)


def _contractions(
    method: Compressor, workers: int, seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Return audits of single exchanges without memory, by input; all workers get the same x.

    Random codes do not get inputs with rare large elements, whose mean loss over few draws would be
    too noisy. An unbiased code is not audited with several workers: the mean of their draws loses
    less than the bound.
    """
    if not method.claims.contractive or (method.claims.unbiased and workers > 1):
        return {}
    segments = Segments.of(SHAPES, method.granularity)
    chance = calls.is_random(
        method, normal(torch.Generator().manual_seed(0), segments.numel), segments
    )
    few = math.ceil((LEAST if chance else FEW) / len(seeds))
    # If the aggregate is not a mean, the error of what a worker sent is taken from its residual.
    other = method.claims.aggregate != "mean"
    carried = memory.make("residual", {}) if other else memory.Memory()
    return {
        kind: merged(
            [
                observed(method, workers, kind, seed, few, carried, apart=False, fresh=other)
                for seed in seeds
            ]
        )
        for kind in (("normal", "equal") if chance else INPUTS)
    }


def _absent(
    method: Compressor, record: Record, singly: Mapping[str, Record], verdicts: MethodVerdicts
) -> None:
    """Record which claims do not apply: the method lacks the declaration, or no audit sees it."""
    claims, skip = method.claims, verdicts.skip
    if not claims.unbiased:
        skip("it does not claim to be unbiased", *MOMENTS)
    elif "exact" not in record:
        skip(_unseen(method), *MOMENTS)
    elif not record["exact"]:
        skip("it declares no variance", VARIANCE, VARIANCE_BOUND)
    elif not (record["bounded"] and record["spread"]["bound"]):
        skip("its source has no bound", VARIANCE_BOUND)
    for claim, name, why in (
        (CONTRACTION, "by_delta", "it declares no constant for every x"),
        (ERROR_BOUND, "by_bound", "no bound for x"),
    ):
        if not claims.contractive:
            skip("it does not claim to contract", claim)
        elif again(method):
            skip(AGAIN, claim)
        elif not any(one.get(name) for one in singly.values()):
            skip(why, claim)
    if "identity" not in record:
        why = _unseen(method) if method.memory == "residual" else "it carries no residual"
        skip(why, IDENTITY, RESIDUAL)
    elif "residual" not in record:
        skip("it contracts in expectation, or by no constant", RESIDUAL)
    if not claims.signs:
        skip("it does not claim to send signs", SIGN)
    if claims.aggregate != "other":
        skip("what arrives is a mean, or a vote", APPLIED)
    elif "compared" not in record:
        skip("what a worker sent is not seen without a residual", APPLIED)


def _unseen(method: Compressor) -> str:
    """Return why what arrives is not compared with what the method declares of one encoding."""
    if again(method):
        return AGAIN
    if method.claims.aggregate != "mean":
        return "the result is not the mean of what is sent"
    return "it sends its residual, too"


def _normal_loss(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    declared = method.claims.gaussian_error
    if declared is None or isinstance(method, MultiRoundCompressor):
        verdicts.skip("it declares no closed form", NORMAL_LOSS)
        return
    if not declared:
        verdicts.skip("it loses nothing", NORMAL_LOSS)
        return
    segments = Segments.of(SHAPES[:1], method.granularity)
    losses = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for step in range(math.ceil(2 * LEAST / len(seeds))):
            x = normal(generator, segments.numel)
            away = energy(
                calls.round_trip(method, x, segments, Key(seed, step, 0)).double() - x.double()
            )
            losses.append(away / energy(x) / declared)
    seen = interval(losses, "draws", STRICT)
    # The closed form is for long segments; these may differ from it by `NORMAL`.
    measured = magnitude(seen.mean - 1, seen.high - seen.mean, seen.n, "draws", NORMAL)
    verdicts.add(NORMAL_LOSS, measured, 4 * NORMAL, setting="normal, M=1")


# ---- votes ---------------------------------------------------------------------------------------


def _votes(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    if not method.claims.signs:
        verdicts.skip("it does not claim to send signs", VOTE, VOTE_BOUND)
        return
    tie = tied(method)
    for workers in VOTERS:
        n = VOTES // 2 * len(seeds)
        seen = []
        for turn in (1, -1):
            rates = failures(method, workers, seeds, uniform=False, turn=turn)
            for strength, rate in zip(STRENGTHS, rates, strict=True):
                p = failing(strength, workers, turn * tie)
                half = bernstein(n * p * (1 - p), 1.0, ERROR / (2 * len(STRENGTHS))) / n
                seen.append(magnitude(rate - p, half, n, "elements", 0.0))
        verdicts.add(VOTE, max(seen, key=_excess), WRONG, setting=f"M={workers}")
        if workers % 2:  # the lemmas leave ties aside
            _vote_bound(method, workers, seeds, verdicts)


def tied(method: Compressor) -> float:
    """Return what a method says that a tied vote is: +1, -1, 0, or NaN for a fair coin."""
    segments, plus = Segments.of([(1,)], method.granularity), torch.ones(1)
    won = method.claims.aggregated([plus, -plus], Context(segments))
    return math.nan if won is None else float(won)


def _vote_bound(
    method: Compressor, workers: int, seeds: Sequence[int], verdicts: MethodVerdicts
) -> None:
    """Judge the lemmas: one worker with uniform noise, which attains Gauss' bound, else normal."""
    uniform = workers == 1
    ratios = []
    n = VOTES * len(seeds)
    sides = [failures(method, workers, seeds, uniform=uniform, turn=turn) for turn in (1, -1)]
    for strength, *pair in zip(STRENGTHS, *sides, strict=True):
        limit = 1 / (math.sqrt(workers) * strength)
        if uniform:
            limit = 0.5 - strength / (2 * math.sqrt(3)) if strength in GAUSS else 0.5
        if limit >= 0.5:
            continue  # a coin flip would satisfy such a limit
        half = bernstein(n * limit * (1 - limit), 1.0, ERROR / len(STRENGTHS)) / n / limit
        ratios.append(magnitude(sum(pair) / 2 / limit, half, n, "elements", 0.0))
    label = f"M={workers}, {'uniform' if uniform else 'normal'} noise"
    verdicts.add(VOTE_BOUND, max(ratios, key=lambda one: one.mean), 1.0, setting=label)


def failing(strength: float, workers: int, tie: float = 0.0) -> float:
    """Return the exact P[vote wrong] of workers with normal noise, where the true sign is +1.

    `strength` is |g| / sigma; `tie`: what a tied vote of an even number is, NaN for a fair coin.
    """
    q = 0.5 * math.erfc(strength / math.sqrt(2))
    chances = [math.comb(workers, k) * q**k * (1 - q) ** (workers - k) for k in range(workers + 1)]
    wrong = math.fsum(chances[workers // 2 + 1 :])
    if workers % 2 == 0 and tie != 1:
        wrong += chances[workers // 2] * (0.5 if math.isnan(tie) else 1.0)
    return wrong


def failures(
    method: Compressor, workers: int, seeds: Sequence[int], *, uniform: bool, turn: int
) -> list[float]:
    """Return the share of wrong signs for each of `STRENGTHS`; the noise has variance 1.

    `turn`: the true sign, +1 or -1, of all elements.
    """
    wrong = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    size = (len(STRENGTHS), VOTES // 2)
    lane = lane_of(method, Segments.of([size], method.granularity))
    mean = turn * torch.tensor(STRENGTHS)[:, None]
    for seed in seeds:
        generator = torch.Generator().manual_seed(2 * seed + (turn > 0))
        buckets = []
        for _ in range(workers):
            if uniform:
                noise = (torch.rand(size, generator=generator) * 2 - 1) * math.sqrt(3)
            else:
                noise = torch.randn(size, generator=generator)
            buckets.append((mean + noise).float().view(-1))
        decoded = simulated(lane, workers, seed).mean(buckets, 0).view(size)
        wrong += (decoded.sign() != turn).double().mean(1)
    return [*(wrong / len(seeds)).tolist()]
