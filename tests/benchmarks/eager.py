"""What the kernels replace: the vectorised torch that research repositories have, tensor by tensor.

The codes are packed into bytes, the draws are torch's, scales stay 0-dimensional tensors; nothing
is fused, preallocated or blocked. These are rows to compare with, not definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def weights(bits: int, like: Tensor) -> Tensor:
    """Return the place values of the codes of `bits` bits in one byte, uint8."""
    return 1 << torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8, whose number fills whole bytes."""
    return (codes.view(-1, 8 // bits) * weights(bits, codes)).sum(1, dtype=torch.uint8)


def from_bytes(packed: Tensor, bits: int) -> Tensor:
    """Unpack what `to_bytes` returns."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).view(-1)


def absmax(g: Tensor) -> Tensor:
    return g.abs().max()


def moments(g: Tensor) -> Pair:
    wide = g.double()
    return wide.sum(), wide.square().sum()


def clipped_max(g: Tensor) -> Pair:
    limit = 2.5 * g.std()
    return limit, g.clamp(-limit, limit).abs().max()


def ternary_encode(g: Tensor, limit: Tensor, scale: Tensor) -> Tensor:
    clipped = g.clamp(-limit, limit)
    selected = torch.rand_like(clipped) < clipped.abs() / scale
    return to_bytes(torch.where(selected, torch.where(g < 0, 2, 1), 0).to(torch.uint8), 2)


def ternary_decode(packed: Tensor, scale: Tensor) -> Tensor:
    codes = from_bytes(packed, 2)
    return ((codes == 1).float() - (codes == 2).float()) * scale


def terngrad(g: Tensor) -> Pair:
    limit, scale = clipped_max(g)
    return ternary_encode(g, limit, scale), scale


def sign_encode(g: Tensor) -> Tensor:
    return to_bytes((g < 0).to(torch.uint8), 1)


def sign_decode(packed: Tensor) -> Tensor:
    return 1.0 - 2.0 * from_bytes(packed, 1).float()


def vote(packed: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(8 * packed[0].numel(), dtype=torch.int8, device=packed[0].device)
    for one in packed:
        total += from_bytes(one, 1).to(torch.int8)
    return to_bytes((total > len(packed) // 2).to(torch.uint8), 1)


def vote_values(packed: Sequence[Tensor]) -> Tensor:
    return sign_decode(vote(packed))


def ef_sign(g: Tensor) -> Pair:
    return sign_encode(g), g.abs().mean()


def ef_sign_decode(coded: Pair) -> Tensor:
    return sign_decode(coded[0]) * coded[1]


def ef_sign_feedback(g: Tensor, residual: Tensor) -> Pair:
    total = g + residual
    coded = ef_sign(total)
    residual.copy_(total - ef_sign_decode(coded).view_as(total))
    return coded


def _columns(g: Tensor) -> Tensor:
    return g.view(g.shape[0], -1) if g.dim() > 1 else g.view(1, -1)


def onebit(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = _columns(g)
    negative = rows < 0
    below = negative.sum(1, keepdim=True)
    low = torch.where(negative, rows, 0).sum(1, keepdim=True) / below.clamp(min=1)
    high = torch.where(negative, 0, rows).sum(1, keepdim=True)
    high = high / (rows.shape[1] - below).clamp(min=1)
    return to_bytes(negative.to(torch.uint8).view(-1), 1), low, high


def onebit_decode(coded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    packed, low, high = coded
    return torch.where(from_bytes(packed, 1).view(len(low), -1) > 0, low, high)


def onebit_feedback(g: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = g + residual
    coded = onebit(total)
    residual.copy_(total - onebit_decode(coded).view_as(total))
    return coded


def _blocks(g: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(g.view(-1), (0, -g.numel() % size)).view(-1, size)


def qsgd(g: Tensor, levels: int = 7, bucket: int = 512) -> Pair:
    rows = _blocks(g, bucket)
    norm = rows.abs().amax(1, keepdim=True)
    level = torch.floor(rows.abs() / norm.clamp(min=1e-30) * levels + torch.rand_like(rows))
    code = level.clamp_(max=levels).to(torch.uint8) | ((rows < 0).to(torch.uint8) << 3)
    return to_bytes(code.view(-1), 4), norm


def qsgd_decode(coded: Pair, levels: int = 7) -> Tensor:
    packed, norm = coded
    code = from_bytes(packed, 4).view(len(norm), -1)
    size = (code & 7).float() * (norm / levels)
    return torch.where(code > 7, -size, size)


def int8(g: Tensor, block: int = 256) -> Pair:
    rows = _blocks(g, block)
    top = rows.abs().amax(1, keepdim=True)
    return (rows / top.clamp(min=1e-30) * 127).round_().to(torch.int8), top


def int8_decode(coded: Pair) -> Tensor:
    return coded[0].float() * (coded[1] / 127)


def topk(g: Tensor, ratio: float = 0.01) -> tuple[Tensor, Tensor, int]:
    flat = g.view(-1)
    _, selected = torch.topk(flat.abs(), max(1, int(flat.numel() * ratio)), sorted=False)
    return selected, flat[selected], flat.numel()


def topk_decode(coded: tuple[Tensor, Tensor, int]) -> Tensor:
    selected, values, n = coded
    return torch.zeros(n, device=values.device).scatter_(0, selected, values)


def topk_feedback(g: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, int]:
    total = g + residual
    coded = topk(total)
    residual.copy_(total - topk_decode(coded).view_as(total))
    return coded


def randomk(g: Tensor, ratio: float = 0.01) -> tuple[Tensor, Tensor, int]:
    flat = g.view(-1)
    count = max(1, int(flat.numel() * ratio))
    selected = torch.randperm(flat.numel(), device=g.device)[:count]
    return selected, flat[selected] / ratio, flat.numel()


def fft(g: Tensor, ratio: float = 0.1) -> tuple[Tensor, Tensor, int]:
    spectrum = torch.fft.rfft(g.view(-1))
    _, selected = torch.topk(spectrum.abs(), max(1, int(spectrum.numel() * ratio)), sorted=False)
    return selected, spectrum[selected], g.numel()


def natural(g: Tensor) -> Pair:
    size = g.abs()
    power = torch.floor(torch.log2(size.clamp(min=1e-38)))
    low = torch.exp2(power)
    power += torch.rand_like(g) < size / low - 1
    return power.to(torch.int8), g < 0


def mean_of(decode: Callable[[Any], Tensor]) -> Callable[[Iterable[Any]], Tensor]:
    """Return what adds up the decodings of several payloads and divides."""

    def mean(coded: Sequence[Any]) -> Tensor:
        total = decode(coded[0])
        for one in coded[1:]:
            total += decode(one)
        return total / len(coded)

    return mean
