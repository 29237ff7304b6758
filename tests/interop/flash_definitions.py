"""FlashAttention's functions by their documentation, for one sequence `[tokens, heads, head dim]`."""

import torch


def live_scores(q_len, k_len, causal, window):
    """The documented rule: bottom right alignment, inclusive sides, -1 without limit."""
    i, j = torch.arange(q_len)[:, None], torch.arange(k_len)
    left, right = window
    at = i + k_len - q_len
    live = torch.ones(q_len, k_len, dtype=torch.bool)
    if left >= 0:
        live &= j >= at - left
    if right >= 0:
        live &= j <= at + right
    return live & (j <= at) if causal else live


def defined(q, k, v, live, *, scale=None, softcap=0.0, slopes=None, sink=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
        s = s - slopes.double()[:, None, None] * (i + k.shape[0] - q.shape[0] - j).abs()
    s = s.masked_fill(~live, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(-1, s.shape[1], 1)], 2)
    lse = s.logsumexp(2)  # of a query without keys: the sink's logit, or -inf
    weights = (s[..., : k.shape[0]] - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def turned(x, cos, sin, at, interleaved):
    """flash-attn's `apply_rotary_emb_torch`, of x `[n, H, D]` at positions `[n]`."""
    half = cos.shape[1]
    own, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = cos[at][:, None], sin[at][:, None]
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        other = torch.stack([-own[..., 1::2], own[..., ::2]], -1).flatten(-2)
    else:
        cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        other = torch.cat([-own[..., half:], own[..., :half]], -1)
    return torch.cat([own * cos + other * sin, rest], -1)
