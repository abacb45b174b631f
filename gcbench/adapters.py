"""Methods written for other libraries, as compressors: GRACE's and Horovod's forms.

A class of GRACE's form has `compress(tensor, name) -> (tensors, context)` and
`decompress(tensors, context)`; one of Horovod's has `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`. In a file `mine.py`:

    from gcbench.adapters import grace
    from grace_dl.dist.compressor.topk import TopKCompressor

    TopK = grace(TopKCompressor, compress_ratio=0.01, contractive=True)

and then `gcbench verify ./mine.py`, `gcbench run --compressor ./mine.py --memory residual`.

GRACE's `aggregate` and `average` decide what is applied, as there: a vote, a sum, or the mean.

What an adapter cannot know: bytes are counted of the tensors as they are, so a method that returns
float32 signs sends 32 bits. A context is not sent, so receivers use that of another tensor of this
shape; a class whose `decompress` then gives another result is refused. Tensors that a class creates
without a dtype have torch's default dtype. Random numbers of torch are seeded for each call, so a
class that calls `torch.manual_seed` is refused, and so is one that draws numbers elsewhere.

All layers and simulated workers share one object of the class, and no checkpoint contains it. A
class is refused if its results for a tensor depend on other calls: a momentum per name as in
GRACE's Signum, or a scale that `compress` stores for `decompress`. State that shows only after more
calls than the check makes, or only in `aggregate`, is not noticed. Memories of GRACE keep state in
the object and are not adapted; its `ResidualMemory` with beta = gamma = 1 is `--memory residual`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Parts, Payload, check_finite
from gcbench.core.errors import GcbenchError, PayloadError, UsageError

FIXED_SEED = 0x6763
WITHOUT_STATE = (
    "Return what decompress needs as tensors, or in the context if it follows from the shape, and "
    "carry values from step to step in a memory, such as --memory momentum or --memory residual"
)
"""The remedy for a class that keeps state in its object."""


class _Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, torch's operations draw from generators of this seed, one per device.

    Threads share torch's global generators: simulated workers do, and so do a hook's thread and the
    training loop.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, with a generator if it draws from the global one."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            func = _with_generator(func)
            kwargs["generator"] = self._generator(args, kwargs)
        return func(*args, **kwargs)

    def _generator(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@lru_cache(maxsize=256)
def _with_generator(func: Any) -> Any:
    """Return the overload of an operation that takes a generator."""

    def names(overload: Any) -> set[str]:
        return {argument.name for argument in overload._schema.arguments}

    wanted = names(func) | {"generator"}
    packet = func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        if names(overload) == wanted:
            return overload
    raise UsageError(
        f"an adapted method draws by {func}, which takes no torch.Generator: threads would share "
        "its numbers. Draw by torch.rand, torch.bernoulli or another operation that takes one"
    )


@dataclass(frozen=True)
class Adapted(Compressor):
    """A method of another library; every tensor of the bucket is compressed by itself."""

    inner: ClassVar[Any] = None
    """The object with `compress` and `decompress` in GRACE's form."""
    declared_unbiased: ClassVar[bool] = False
    declared_contractive: ClassVar[bool] = False
    averages: ClassVar[bool] = True
    """Whether the mean of the decoded tensors is applied; else `inner` aggregates them."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    scratch = True

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        """Return the tensors of all pieces, flattened."""
        parts: list[Tensor] = []
        for i, piece in enumerate(self._pieces(x, ctx)):
            self._template(tuple(piece.shape), piece.device)  # refuses what cannot be decoded
            tensors, _ = self._call(piece, str(i), _seed(ctx, i))
            parts += [_sent(tensor) for tensor in tensors]
        return Payload(tuple(parts) or (x.new_empty(0),))

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the decompressed pieces."""
        device = payload.parts[0].device if payload.parts else ctx.shared.device
        out = _output(ctx, device)
        rest = list(payload.parts)
        if not ctx.segments.numel and len(rest) == 1 and not rest[0].numel():
            rest.pop()  # a bucket without elements has one empty part
        every = ctx._replace(key=ctx.key._replace(rank=0))  # all workers decode alike
        for i, piece in enumerate(self._pieces(out, ctx)):
            likes, fixed, context = self._template(tuple(piece.shape), piece.device)
            if len(rest) < len(likes):
                raise PayloadError(f"{self.name}: payload has too few parts")
            tensors = [self._received(rest.pop(0), like, fixed) for like in likes]
            try:
                with _Seeded(_seed(every, i)):
                    decoded = self.inner.decompress(tensors, context)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise PayloadError(f"{self.name}: decompress refused a payload: {error}") from error
            if decoded.numel() != piece.numel():
                raise PayloadError(f"{self.name}: decompress returned {tuple(decoded.shape)}")
            piece.copy_(decoded.reshape(piece.shape))
        if rest:
            raise PayloadError(f"{self.name}: payload has {len(rest)} parts too many")
        return check_finite(out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean of the decoded tensors, or what the class aggregates."""
        if self.averages:
            return super().mean(payloads, ctx)
        apart = ctx._replace(out=None)
        return self.aggregated([self.decode(payload, apart) for payload in payloads], ctx)

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return what the class aggregates of the decoded buckets, float32, shape (n,) each."""
        out = _output(ctx, decoded[0].device)
        every = ctx._replace(key=ctx.key._replace(rank=0))
        for i, (piece, *pieces) in enumerate(
            zip(*(self._pieces(bucket, ctx) for bucket in (out, *decoded)), strict=True)
        ):
            with _Seeded(_seed(every, i)):
                total = self.inner.aggregate([one.clone() for one in pieces])
            piece.copy_(total / len(pieces) if getattr(self.inner, "average", True) else total)
        return out

    def _received(self, part: Tensor, like: Tensor, fixed: bool) -> Tensor:
        """Return a part with the dtype and shape of the template; `fixed`: of its size, too."""
        expected = _sent(like)
        if part.dtype != expected.dtype or (fixed and part.numel() != expected.numel()):
            raise PayloadError(
                f"{self.name}: a part has {part.numel()} elements of {part.dtype}: expected "
                f"{expected.numel()} of {expected.dtype}"
            )
        if part.numel() * part.element_size() % like.element_size():
            raise PayloadError(f"{self.name}: a part ends within an element of {like.dtype}")
        if like.dtype is torch.bool:
            part = part != 0
        tensor = part.clone().view(like.dtype)
        return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor

    def _pieces(self, x: Tensor, ctx: Context) -> Iterator[Tensor]:
        """Yield views of the tensors of a bucket that are not empty."""
        for start, shape in ctx.segments.tensors:
            size = torch.Size(shape).numel()
            if size:
                yield x[start : start + size].view(shape)

    @classmethod
    @lru_cache(maxsize=256)
    def _template(
        cls, shape: tuple[int, ...], device: torch.device
    ) -> tuple[list[Tensor], bool, Any]:
        """Return tensors, whether their sizes are fixed, and context of a tensor of this shape.

        Sizes count as fixed if those of six tensors of different distributions and scales agree.

        Raises:
            UsageError: `compress` fails, seeds torch or returns other types than those of the form;
                or the class keeps state, or depends on contexts that differ.
        """
        before = torch.initial_seed(), torch.get_rng_state()
        with _Seeded(FIXED_SEED):
            normal = torch.randn(3, *shape, dtype=torch.float32, device=device) ** 3
        ones = torch.ones(shape, dtype=torch.float32, device=device)
        alone = torch.zeros_like(ones)
        alone.view(-1)[-1] = 1.0
        inputs = (normal[0], ones, normal[1], normal[2], alone, normal[0] * 1e-3)
        results = [cls._compressed(x, FIXED_SEED + i) for i, x in enumerate(inputs)]
        if torch.initial_seed() != before[0]:
            torch.set_rng_state(before[1])
            raise UsageError(
                f"{cls.__name__}: compress calls torch.manual_seed, which also seeds the numbers "
                "of the training loop. Leave it out (an adapter seeds each call), or draw from a "
                "torch.Generator"
            )
        for i in range(2):
            cls._refuse_state(inputs[i], FIXED_SEED + i, *results[i])
        first, shared = results[0]
        for tensors, context in results[1:]:
            by_both = [cls._decoded(tensors, each, device) for each in (context, shared)]
            if not torch.equal(*by_both):
                raise UsageError(
                    f"{cls.__name__}: decompress depends on a context that differs between tensors "
                    f"of shape {shape}. A context is not sent: return such values as tensors"
                )
        sizes = {tuple(tensor.numel() for tensor in tensors) for tensors, _ in results}
        return first, len(sizes) == 1, shared

    @classmethod
    def _refuse_state(cls, x: Tensor, seed: int, tensors: Sequence[Tensor], context: Any) -> None:
        """Compare `tensors` and `context`, from `compress` of `x`, with those of another call.

        Before the second call, and again before the first result is decompressed, `compress` gets a
        tensor of the opposite sign and another scale, and one of another shape.

        Raises:
            UsageError: the results differ.
        """
        other = x.new_ones((2 if x.numel() == 1 else 1,) * max(1, x.dim()))

        def between() -> None:
            cls._compressed(x * -100, seed)
            with suppress(UsageError):  # a class may refuse other shapes
                cls._compressed(other, seed)

        between()
        again, its_context = cls._compressed(x, seed)
        at_once = cls._decoded(again, its_context, x.device)
        between()
        later = cls._decoded(tensors, context, x.device)
        if not (_identical(tensors, again) and torch.equal(at_once, later)):
            raise UsageError(
                f"{cls.__name__}: results for a tensor of shape {tuple(x.shape)} change with other "
                "calls: the class keeps state in the object between calls (or draws random numbers "
                f"outside torch). All layers and workers share the object. {WITHOUT_STATE}"
            )

    @classmethod
    def _call(cls, x: Tensor, name: str, seed: int) -> Any:
        """Return what `compress` returns for a copy of `x`.

        Raises:
            UsageError: it fails.
        """
        try:
            with _Seeded(seed):
                return cls.inner.compress(x.clone(), name)
        except GcbenchError:
            raise
        except Exception as error:  # of somebody else's code
            raise UsageError(
                f"{cls.__name__}: compress of a tensor of shape {tuple(x.shape)} raised "
                f"{type(error).__name__} ({error}). If a new object compresses this shape, the "
                f"likely cause is state that the class keeps in the object. {WITHOUT_STATE}"
            ) from error

    @classmethod
    def _compressed(cls, x: Tensor, seed: int) -> tuple[list[Tensor], Any]:
        """Return copies of the tensors that `compress` returns, and the context.

        Raises:
            UsageError: `compress` fails, or returns other types.
        """
        result = cls._call(x, f"template of {tuple(x.shape)}", seed)
        match result:
            case (list() | tuple() as tensors, context) if all(
                isinstance(tensor, Tensor) for tensor in tensors
            ):
                return [tensor.detach().clone() for tensor in tensors], context
        raise UsageError(
            f"{cls.__name__}: compress returned {_types(result)}: expected (tensors, context) with "
            "a list of tensors in GRACE's form, (tensor, context) in Horovod's. Return that, or "
            "use the adapter of the other form"
        )

    @classmethod
    def _decoded(cls, tensors: Sequence[Tensor], context: Any, device: torch.device) -> Tensor:
        """Return the bits of the decompressed tensor; with a context that does not fit, none."""
        with _Seeded(FIXED_SEED):
            try:
                result: Tensor = cls.inner.decompress([one.clone() for one in tensors], context)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return torch.empty(0, dtype=torch.int32, device=device)
        return result.detach().float().contiguous().clone().view(torch.int32)


def _output(ctx: Context, device: torch.device) -> Tensor:
    """Return the buffer for a decoded bucket: float32 whatever torch's default dtype is."""
    if ctx.out is not None:
        return ctx.out
    return torch.empty(ctx.segments.numel, dtype=torch.float32, device=device)


def _types(value: Any) -> str:
    """Return the type of a value; of a tuple or list, those of its items."""
    if isinstance(value, tuple | list):
        return f"({', '.join(_types(item) for item in value)})"
    return type(value).__name__


def _seed(ctx: Context, i: int) -> int:
    """Return the seed of the bucket's tensor `i`."""
    digest = hashlib.blake2b(repr((*ctx.key, i)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same dtypes, shapes and bits."""
    return [(one.dtype, one.shape) for one in some] == [
        (one.dtype, one.shape) for one in others
    ] and all(
        torch.equal(_sent(one).view(torch.uint8), _sent(other).view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


def _sent(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a part of a payload, of at most 4 bytes per element."""
    flat = tensor.detach().reshape(-1).clone()
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8)
    return flat.view(torch.int32) if flat.element_size() > 4 else flat


class AdaptedClaims(Claims[Adapted], of=Adapted):
    """What the caller of the adapter declares."""

    @property
    def unbiased(self) -> bool:
        """Return the claim of the caller."""
        return self.codec.declared_unbiased

    @property
    def contractive(self) -> bool:
        """Return the claim of the caller."""
        return self.codec.declared_contractive

    @property
    def aggregate(self) -> str:
        """Return "mean", or "other" if the class aggregates."""
        return "mean" if self.codec.averages else "other"

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor | None:
        """Return the mean, or what the class aggregates."""
        if self.codec.averages:
            return super().aggregated(decoded, ctx)
        return self.codec.aggregated(decoded, ctx._replace(out=None))

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return (1 - 1 / 2n) ||x||^2: a contractive method keeps the largest element or more."""
        if not self.contractive:
            return None
        return float(x.double().square().sum()) * (1 - 0.5 / max(1, x.numel()))


class _Horovod:
    """A class of Horovod's form in GRACE's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        compressed, context = self.inner.compress(tensor)
        return [compressed], context

    def decompress(self, tensors: Sequence[Tensor], context: Any) -> Tensor:
        decoded: Tensor = self.inner.decompress(tensors[0], context)
        return decoded


def _averages(inner: Any) -> bool:
    """Return whether a class of GRACE's form has no aggregate, or has the sum of its base class."""
    if not callable(getattr(inner, "aggregate", None)):
        return True
    summands = torch.tensor([[1.0, -2.0], [2.0, -3.0]], dtype=torch.float32)
    try:
        total = inner.aggregate(list(summands))
    except Exception:  # of somebody else's code
        return False
    return bool(getattr(inner, "average", True)) and torch.equal(total, summands.sum(0))


@dataclass(frozen=True)
class _Form:
    """How a library calls the functions of its compressors."""

    library: str
    calls: dict[str, tuple[str, ...]]
    """The arguments, by function."""
    advice: str

    def check(self, name: str, user: Any) -> None:
        """Refuse a user's object without these functions, or whose functions take other arguments.

        Raises:
            UsageError: A function is missing or does not accept the arguments.
        """
        for function, arguments in self.calls.items():
            call = getattr(user, function, None)
            if not callable(call):
                raise UsageError(
                    f"{name} has no function {function!r}: expected a compressor's form"
                )
            parameters = _refused(call, len(arguments))
            if parameters is not None:
                raise UsageError(
                    f"{name}: {function}({', '.join(parameters)}) cannot be called as "
                    f"{function}({', '.join(arguments)}), as {self.library} does: {self.advice}"
                )


GRACE = _Form(
    "GRACE",
    {"compress": ("tensor", "name"), "decompress": ("tensors", "context")},
    "pass a class of Horovod's form to gcbench.adapters.horovod",
)
HOROVOD = _Form(
    "Horovod",
    {"compress": ("tensor",), "decompress": ("tensor", "context")},
    "pass a class of GRACE's form to gcbench.adapters.grace, or make the function static",
)


def _refused(call: Callable[..., Any], count: int) -> list[str] | None:
    """Return the names of a function's parameters if it does not accept `count` arguments."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        return list(signature.parameters)
    return None


def _adapted(cls: type[Any], inner: Any, *, unbiased: bool, contractive: bool) -> type[Compressor]:
    """Return the compressor class, defined in the module that called `grace` or `horovod`.

    `inner`: an object of GRACE's form.
    """
    members = {
        "inner": inner,
        "averages": _averages(inner),
        "declared_unbiased": unbiased,
        "declared_contractive": contractive,
        "__doc__": type(inner).__doc__ or cls.__name__,
        "__module__": sys._getframe(2).f_globals["__name__"],
    }
    return dataclass(frozen=True)(type(cls.__name__, (Adapted,), members))


def grace(
    cls: type[Any], *, unbiased: bool = False, contractive: bool = False, **arguments: Any
) -> type[Compressor]:
    """Return the compressor class for a class of GRACE's form.

    `arguments` are passed to its constructor. `unbiased` and `contractive` are claims that
    `gcbench verify` tests; error feedback needs the second. The class belongs to the calling
    module, so that a file with one such line is a method.

    Raises:
        UsageError: The class cannot be constructed, or its functions are not of GRACE's form.
    """
    name = getattr(cls, "__name__", type(cls).__name__)
    try:
        inner = cls(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be constructed with {arguments or 'no arguments'} ({error}): expected "
            "a class and the arguments of its constructor. Pass grace(Class, argument=value)"
        ) from error
    GRACE.check(name, inner)
    return _adapted(cls, inner, unbiased=unbiased, contractive=contractive)


def horovod(
    cls: type[Any], *, unbiased: bool = False, contractive: bool = False
) -> type[Compressor]:
    """Return the compressor class for a class of Horovod's form; see `grace`.

    Raises:
        UsageError: `cls` is an object, or its functions are not of Horovod's form.
    """
    if not isinstance(cls, type):
        raise UsageError(f"horovod received {cls!r}: expected a class. Pass the class itself")
    HOROVOD.check(cls.__name__, cls)
    return _adapted(cls, _Horovod(cls), unbiased=unbiased, contractive=contractive)
