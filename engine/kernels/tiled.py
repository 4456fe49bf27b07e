"""Pieces of kernels: tiles of tiered keys and values, softmax in running form.

Shapes: T tokens of a tile, C channels, R query rows, V value channels. Keys come as [C, T], values
as [T, V], both fp32. ``row`` is slot * G + head, a 64-bit number or [1, T] / [T, 1] of them.

``keys`` and ``values`` are the tuples of pointers that TieredLayer.key_tensors and value_tensors
name. ONE: the tile is one block, so row and tier are numbers and one tier is read; else row and
tier are [T], each token's own.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, MODE: tl.constexpr):
    """a @ b; MODE bf16 rounds both, ieee and tf32 take fp32. bf16 never runs in the interpreter."""
    if MODE == "bf16":
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        result = tl.dot(a, b, input_precision=MODE)
    return result


@triton.jit
def quad_codes(plane, row, channel, offset, valid, D: tl.constexpr):
    """2-bit numbers of a plane [.., D/4, 32] as int32 [C, T]."""
    packed = tl.load(plane + (row * (D // 4) + channel // 4) * 32 + offset, mask=valid, other=0)
    return (packed.to(tl.int32) >> ((channel % 4) * 2)) & 3


@triton.jit
def warm_keys(
    top, mid, low, minimum, scale, row, channel, offset, valid, row_valid, D: tl.constexpr
):
    """minimum + scale * code. ``row_valid`` masks the loads of minimum and scale: [C, 1] when the
    tile is of one block."""
    high = quad_codes(top, row, channel, offset, valid, D) << 6
    high += quad_codes(mid, row, channel, offset, valid, D) << 4
    pairs = tl.load(low + (row * (D // 2) + channel // 2) * 32 + offset, mask=valid, other=0)
    code = high + ((pairs.to(tl.int32) >> ((channel % 2) * 4)) & 15)
    least = tl.load(minimum + row * D + channel, mask=row_valid, other=0).to(tl.float32)
    step = tl.load(scale + row * D + channel, mask=row_valid, other=0).to(tl.float32)
    return tl.where(valid, least + step * code.to(tl.float32), 0.0)


@triton.jit
def full_keys(keys, row, channel, offset, valid, D: tl.constexpr):
    return tl.load(keys + (row * 32 + offset) * D + channel, mask=valid, other=0).to(tl.float32)


@triton.jit
def warm_values(
    codes, scale, minimum, row, offset, channel, valid, V: tl.constexpr, BITS: tl.constexpr
):
    """BITS 8: scale of the token times code; 4: minimum + scale * code of 32 channels."""
    place = row * 32 + offset
    if BITS == 8:
        code = tl.load(codes + place * V + channel, mask=valid, other=0).to(tl.float32)
        step = tl.load(scale + place + channel * 0, mask=valid, other=0).to(tl.float32)
        result = step * code
    else:
        pairs = tl.load(codes + place * (V // 2) + channel // 2, mask=valid, other=0)
        code = ((pairs.to(tl.int32) >> ((channel % 2) * 4)) & 15).to(tl.float32)
        part = place * ((V + 31) // 32) + channel // 32
        step = tl.load(scale + part, mask=valid, other=0).to(tl.float32)
        least = tl.load(minimum + part, mask=valid, other=0).to(tl.float32)
        result = tl.where(valid, least + step * code, 0.0)
    return result


@triton.jit
def full_values(values, row, offset, channel, valid, V: tl.constexpr):
    return tl.load(values + (row * 32 + offset) * V + channel, mask=valid, other=0).to(tl.float32)


@triton.jit
def query_tile(q, rows, known, channel, inside, factor, D: tl.constexpr):
    """Queries ``rows`` [R] of q, times factor: [R, C]; zeros where not known or not inside."""
    at = q + rows[:, None] * D + channel[None, :]
    query = tl.load(at, mask=known[:, None] & inside[None, :], other=0)
    return query.to(tl.float32) * factor


@triton.jit
def query_rows(R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Of program axis 0, tiles of R rows each: which R they are of, the rows [BLOCK_R] of this
    tile counted over all, and which of them there are."""
    tiles = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0).to(tl.int64)
    which = pid // tiles
    member = (pid % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    return which, which * R + member, member < R


@triton.jit
def queries(
    q,
    rows,
    known,
    factor,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LATENT: tl.constexpr,
):
    """``query`` and ``rest`` of attend_tile."""
    channel = tl.arange(0, BLOCK_D)
    query = query_tile(q, rows, known, channel, channel < (V if LATENT else D), factor, D)
    rest = query
    if LATENT:
        beyond = V + tl.arange(0, BLOCK_P)
        rest = query_tile(q, rows, known, beyond, beyond < D, factor, D)
    return query, rest


@triton.jit
def nothing_seen(BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):
    """A running softmax at its start: peak, total, out."""
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R, BLOCK_V], tl.float32)


@triton.jit
def key_tile(
    keys,
    row,
    tier,
    offset,
    seen,
    channel,
    inside,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONE: tl.constexpr,
):
    """Keys of the tokens ``seen`` [T], channels ``channel`` [C], zeros elsewhere: [C, T]."""
    full, top, mid, low, minimum, scale = keys
    at, lane, known = channel[:, None], offset[None, :], inside[:, None]
    valid = known & seen[None, :]
    if ONE:
        k = tl.zeros([BLOCK_C, 32], tl.float32)
        if tier == 1:
            k = warm_keys(top, mid, low, minimum, scale, row, at, lane, valid, known, D)
        if tier == 0:
            k = full_keys(full, row, at, lane, valid, D)
    else:
        warm, rows = valid & (tier == 1)[None, :], row[None, :]
        k = warm_keys(top, mid, low, minimum, scale, rows, at, lane, warm, warm, D)
        k += full_keys(full, rows, at, lane, valid & (tier == 0)[None, :], D)
    return k


@triton.jit
def value_tile(
    values,
    row,
    tier,
    offset,
    seen,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BITS: tl.constexpr,
    ONE: tl.constexpr,
):
    """Values of the tokens ``seen`` [T], zeros elsewhere: [T, V]."""
    full, codes, scale, minimum = values
    channel = tl.arange(0, BLOCK_V)[None, :]
    lane = offset[:, None]
    valid = seen[:, None] & (channel < V)
    if ONE:
        v = tl.zeros([32, BLOCK_V], tl.float32)
        if tier == 1:
            v = warm_values(codes, scale, minimum, row, lane, channel, valid, V, BITS)
        if tier == 0:
            v = full_values(full, row, lane, channel, valid, V)
    else:
        warm, rows = valid & (tier == 1)[:, None], row[:, None]
        v = warm_values(codes, scale, minimum, rows, lane, channel, warm, V, BITS)
        v += full_values(full, rows, lane, channel, valid & (tier == 0)[:, None], V)
    return v


@triton.jit
def attend_tile(
    query,
    rest,
    keys,
    values,
    row,
    tier,
    offset,
    seen,
    peak,
    total,
    out,
    D: tl.constexpr,
    V: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ONE: tl.constexpr,
    LATENT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Take 32 tokens into a running softmax. LATENT: a key is [V channels, which are its value
    | the rest], its queries are ``query`` and ``rest``; else ``rest`` is not read."""
    channel = tl.arange(0, BLOCK_D)
    inside = channel < (V if LATENT else D)
    k = key_tile(keys, row, tier, offset, seen, channel, inside, D, BLOCK_D, ONE)
    logits = dot(query, k, DOT)
    if LATENT:
        beyond = V + tl.arange(0, BLOCK_P)
        p = key_tile(keys, row, tier, offset, seen, beyond, beyond < D, D, BLOCK_P, ONE)
        logits += dot(rest, p, DOT)
        v = tl.trans(k)
    else:
        v = value_tile(values, row, tier, offset, seen, V, BLOCK_V, BITS, ONE)
    scores = tl.where(seen[None, :], logits, float("-inf"))
    return fold(scores, v, peak, total, out, DOT)


@triton.jit
def finite(peak):
    """-inf - -inf is NaN, so what saw nothing is measured from 0."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def fold(scores, values, peak, total, out, MODE: tl.constexpr):
    """Take scores [R, T] (-inf where hidden) and values [T, V] into a running softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = finite(new_peak)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    out = out * shrink[:, None] + dot(weights, values, MODE)
    return new_peak, total, out


@triton.jit
def finish(peak, total, out):
    """(o, lse) of a running softmax; o = 0 and lse = -inf when nothing was seen."""
    seen = total > 0
    o = out / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, finite(peak) + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    return o, lse


@triton.jit
def store_rows(out, lse, at, known, peak, total, acc, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """``finish`` into rows ``at`` [R] of out and lse."""
    o, log_sum = finish(peak, total, acc)
    value = tl.arange(0, BLOCK_V)
    place = out + at[:, None] * V + value[None, :]
    tl.store(place, o, mask=known[:, None] & (value[None, :] < V))
    tl.store(lse + at, log_sum, mask=known)
