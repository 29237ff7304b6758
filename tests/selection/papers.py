"""The layers of `sparseflash.selection` written from their papers' equations, a query at a time, in plain PyTorch.

Each function takes a layer, for its weights and sizes, and one sequence `x [N, F]`. It returns the output `[N, F]`, the
keys that each query head chose, bool `[Hq, N, N]`, and the loss or None.
"""

import torch


def rotated(x, position, base=10_000.0):
    half = len(x) // 2
    angle = position * base ** -(torch.arange(half, dtype=torch.float64) / half)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([x[:half] * cosine - x[half:] * sine, x[half:] * cosine + x[:half] * sine])


def maybe_rotated(layer, x, position):
    return x if layer.rotary is None else rotated(x, float(position))


def projected(layer, x):
    """q `[Hq, N, D]`, and the keys and values of each branch, `[pairs, Hkv, N, D]`, not rotated."""
    pairs = layer.pairs * layer.kv_heads
    heads = layer.num_heads + pairs
    features = layer.qkv(x)
    keys = features[:, : heads * layer.head_dim].unflatten(1, (heads, layer.head_dim)).transpose(0, 1)
    v = features[:, heads * layer.head_dim :].unflatten(1, (pairs, layer.value_dim)).transpose(0, 1)
    q, k = keys.split([layer.num_heads, pairs])
    if layer.norm_q is not None:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt() * norm.weight
            for y, norm in ((q, layer.norm_q), (k, layer.norm_k))
        )
    return q, k.unflatten(0, (layer.pairs, -1)), v.unflatten(0, (layer.pairs, -1))


def rotated_rows(layer, x):
    return torch.stack([torch.stack([maybe_rotated(layer, row, t) for t, row in enumerate(head)]) for head in x])


def attend(layer, q, keys, values):
    if not len(keys):
        return torch.zeros(layer.value_dim, dtype=q.dtype)
    return weights(layer, q, keys) @ values


def weights(layer, q, keys):
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    return (keys @ q * scale).softmax(0)


def best(scores, k):
    return set(sorted(scores, key=lambda number: (-scores[number], number))[:k])


def mixed(layer, outs):
    return layer.out(torch.stack([torch.cat(heads) for heads in outs]))


def marked(chosen, span, t, n):
    row = torch.zeros(n, dtype=torch.bool)
    for block in chosen:
        row[block * span : (block + 1) * span] = True
    row[t + 1 :] = False
    return row


def native(layer, x):
    n, group = len(x), layer.group
    q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win) = projected(layer, x)
    q, k_slc, k_win = rotated_rows(layer, q), rotated_rows(layer, k_slc), rotated_rows(layer, k_win)
    length, stride, block = layer.compression, layer.stride, layer.block

    def compressed(rows, which):
        return rows.mean(0) + layer.compress[which]((rows + layer.places[which]).flatten())

    gates = torch.sigmoid(layer.gate(x)).unflatten(1, (3, -1))
    outs, live = [], torch.zeros(layer.num_heads, n, n, dtype=torch.bool)
    spans = [slice(j, j + length) for j in range(0, n - length + 1, stride)]
    all_keys = x.new_zeros(layer.kv_heads, 0, layer.head_dim)
    all_values = x.new_zeros(layer.kv_heads, 0, layer.value_dim)
    if spans:
        of_heads = range(layer.kv_heads)
        all_keys = [[maybe_rotated(layer, compressed(k_cmp[g, s], 0), s.start) for s in spans] for g in of_heads]
        all_keys = torch.stack([torch.stack(rows) for rows in all_keys])
        all_values = torch.stack([torch.stack([compressed(v_cmp[g, s], 1) for s in spans]) for g in of_heads])
    for t in range(n):
        ended = [j for j, s in enumerate(spans) if s.stop - 1 <= t]
        heads = []
        for g in range(layer.kv_heads):
            of_group = range(g * group, (g + 1) * group)
            keys, values = all_keys[g, : len(ended)], all_values[g, : len(ended)]
            importance = dict.fromkeys(range(t // block + 1), 0.0)
            for h in of_group:
                for j, p in zip(ended, weights(layer, q[h, t], keys).tolist() if ended else []):
                    for piece in range(length // stride):
                        for part in range(block // stride):
                            # Equation 9: block i has the pieces from i * l' / d on.
                            if (where := j + piece - part) % (block // stride) == 0:
                                number = where // (block // stride)
                                if number in importance:
                                    importance[number] += p
            own = t // block
            forced = {i for i in importance if i < layer.first or i > own - layer.last}
            chosen = best({i: (torch.inf if i in forced else p) for i, p in importance.items()}, layer.chosen)
            row = marked(chosen, block, t, n)
            near = slice(max(0, t + 1 - layer.window), t + 1)
            for h in of_group:
                live[h, t] = row
                heads.append(
                    gates[t, 0, h] * attend(layer, q[h, t], keys, values)
                    + gates[t, 1, h] * attend(layer, q[h, t], k_slc[g, row], v_slc[g, row])
                    + gates[t, 2, h] * attend(layer, q[h, t], k_win[g, near], v_win[g, near])
                )
        outs.append(heads)
    return mixed(layer, outs), live, None


def mixture(layer, x):
    n, block = len(x), layer.block
    q, (k,), (v,) = projected(layer, x)
    q, k = rotated_rows(layer, q), rotated_rows(layer, k)
    outs, live = [], torch.zeros(layer.num_heads, n, n, dtype=torch.bool)
    for t in range(n):
        heads = []
        for h in range(layer.num_heads):
            g, own = h // layer.group, t // block
            scores = {i: (q[h, t] @ k[g, i * block : (i + 1) * block].mean(0)).item() for i in range(own)}
            live[h, t] = row = marked(best({**scores, own: torch.inf}, layer.chosen), block, t, n)
            heads.append(attend(layer, q[h, t], k[g, row], v[g, row]))
        outs.append(heads)
    return mixed(layer, outs), live, None


def divergence(target, scores):
    logs = scores.log_softmax(0)
    return sum(p * (p.log() - log) for p, log in zip(target, logs) if p > 0)


def taught(layer, q, k, t, heads, keys):
    with torch.no_grad():
        return torch.stack([weights(layer, q[h, t], k[h * len(k) // len(q), keys]) for h in heads]).mean(0)


def blocks(layer, x):
    n, block = len(x), layer.block
    q, (k,), (v,) = projected(layer, x)
    q, k = rotated_rows(layer, q), rotated_rows(layer, k)
    seen = x.detach()
    index_q = layer.index_norm_q(layer.index_q(seen).unflatten(1, (layer.kv_heads, -1)))
    index_k = layer.index_norm_k(layer.index_k(seen))
    index_q = [[maybe_rotated(layer, row, t) for row in rows] for t, rows in enumerate(index_q)]
    index_k = torch.stack([maybe_rotated(layer, row, t) for t, row in enumerate(index_k)])
    outs, live, loss = [], torch.zeros(layer.num_heads, n, n, dtype=torch.bool), 0.0
    for t in range(n):
        heads, own = [], t // block
        for g in range(layer.kv_heads):
            of_group = range(g * layer.group, (g + 1) * layer.group)
            scores = index_k[: t + 1] @ index_q[t][g] * layer.index_dim**-0.5
            best_key = {i: scores[i * block : (i + 1) * block].max().item() for i in range(own + 1)}
            forced = {i: torch.inf for i in (*range(min(layer.first, own + 1)), own)}
            row = marked(best(best_key | forced, layer.chosen), block, t, n)
            keys = row.nonzero()[:, 0] if layer.teach == "chosen" else torch.arange(t + 1)
            loss = loss + divergence(taught(layer, q, k, t, of_group, keys), scores[keys]) / n / layer.kv_heads
            for h in of_group:
                live[h, t] = row
                heads.append(attend(layer, q[h, t], k[g, row], v[g, row]))
        outs.append(heads)
    return mixed(layer, outs), live, loss


def latent_heads(layer, x):
    """Queries, keys and values of multi-head latent attention, each head's own: `[H, N, features]`."""
    made, sizes = layer.latent, layer.latent.of
    u, down = made.q_norm(made.q_down(x)), made.kv_down(x)
    c, shared = made.kv_norm(down[:, : sizes.rank]), down[:, sizes.rank :]
    shared = torch.stack([maybe_rotated(layer, row, t) for t, row in enumerate(shared)])
    q, k, v = [], [], []
    for h, rows in enumerate(made.q_up(u).unflatten(1, (layer.num_heads, -1)).transpose(0, 1)):
        turned = torch.stack([maybe_rotated(layer, row[sizes.plain :], t) for t, row in enumerate(rows)])
        q.append(torch.cat([rows[:, : sizes.plain], turned], 1))
        k.append(torch.cat([c @ made.k_up[h].T, shared], 1))
        v.append(c @ made.v_up[h].T)
    return torch.stack(q), torch.stack(k), torch.stack(v)


def tokens(layer, x):
    n = len(x)
    seen = x.detach()
    queries = seen
    if isinstance(getattr(layer, "latent", None), torch.nn.Module):
        q, k, v = latent_heads(layer, x)
        queries = layer.latent.q_norm(layer.latent.q_down(seen)).detach()
    else:
        q, (k,), (v,) = projected(layer, x)
        q, k = rotated_rows(layer, q), rotated_rows(layer, k)
    index_q = layer.index_q(queries).unflatten(1, (layer.index_heads, -1))
    index_k = torch.stack(
        [maybe_rotated(layer, row, t) for t, row in enumerate(layer.index_norm_k(layer.index_k(seen)))]
    )
    gain = layer.weights(seen) / (layer.index_heads * layer.index_dim) ** 0.5
    outs, live, loss = [], torch.zeros(layer.num_heads, n, n, dtype=torch.bool), 0.0
    for t in range(n):
        products = torch.stack([index_k[: t + 1] @ maybe_rotated(layer, row, t) for row in index_q[t]])
        scores = gain[t] @ products.relu()
        row = marked(best(dict(enumerate(scores.tolist())), layer.chosen), 1, t, n)
        keys = row.nonzero()[:, 0] if layer.teach == "chosen" else torch.arange(t + 1)
        loss = loss + divergence(taught(layer, q, k, t, range(layer.num_heads), keys), scores[keys]) / n
        live[:, t] = row
        outs.append(
            [attend(layer, q[h, t], k[h * len(k) // len(q), row], v[h * len(k) // len(q), row]) for h in range(len(q))]
        )
    return mixed(layer, outs), live, loss


def spans(layer, x):
    n, span = len(x), layer.span
    q, (k,), (v,) = projected(layer, x)
    q, k = rotated_rows(layer, q), rotated_rows(layer, k)
    seen = x.detach()
    index_q = layer.index_norm_q(layer.index_q(seen).unflatten(1, (layer.index_heads, -1)))
    index_k = layer.index_k(seen)
    outs, live, loss = [], torch.zeros(layer.num_heads, n, n, dtype=torch.bool), 0.0
    for t in range(n):
        ended = (t + 1) // span
        scores = x.new_zeros(ended)
        if ended:
            means = torch.stack([layer.index_norm_k(index_k[b * span : (b + 1) * span].mean(0)) for b in range(ended)])
            means = torch.stack([maybe_rotated(layer, row, b * span) for b, row in enumerate(means)])
            rows = torch.stack([maybe_rotated(layer, row, t) for row in index_q[t]])
            scores = (rows @ means.T).relu().sum(0) * layer.index_dim**-0.5
        chosen = best(dict(enumerate(scores.tolist())), layer.chosen)
        row = marked(chosen | ({ended} if (t + 1) % span else set()), span, t, n)
        if ended:
            visible = row.nonzero()[:, 0] if layer.teach == "chosen" else torch.arange(t + 1)
            p = torch.zeros(n, dtype=x.dtype)
            p[visible] = taught(layer, q, k, t, range(layer.num_heads), visible)
            of_span = torch.tensor(sorted(chosen) if layer.teach == "chosen" else range(ended))
            target = torch.stack([p[b * span : (b + 1) * span].max() for b in of_span.tolist()])
            loss = loss + divergence(target / target.sum(), scores[of_span]) / n
        live[:, t] = row
        outs.append([attend(layer, q[h, t], k[h // layer.group, row], v[h // layer.group, row]) for h in range(len(q))])
    return mixed(layer, outs), live, loss


def video(layer, x, shape, text=0):
    """Also takes the shape of the video, and the tokens of text before it; the chosen keys are in row-major order."""
    n = len(x)
    heads = layer.qkv(x).unflatten(1, (-1, layer.head_dim)).transpose(0, 1)
    q, k, v = heads.split([layer.num_heads, layer.kv_heads, layer.kv_heads])
    _, height, width = shape
    cube_of = {}
    for token in range(n - text):
        at = token // (height * width), token // width % height, token % width
        cube_of.setdefault(tuple(a // c for a, c in zip(at, layer.cube)), []).append(text + token)
    cubes = [cube_of[name] for name in sorted(cube_of)]
    group = layer.num_heads // layer.kv_heads
    q_c, k_c, v_c = (torch.stack([y[:, cube].mean(1) for cube in cubes], 1) for y in (q, k, v))
    gates = layer.gate(x).unflatten(1, (2, layer.num_heads, layer.head_dim))
    out, live = (
        torch.zeros(layer.num_heads, n, layer.head_dim, dtype=x.dtype),
        torch.zeros(layer.num_heads, n, n).bool(),
    )
    rows = {}
    for h in range(layer.num_heads):
        for token in range(text):
            live[h, token] = True
            rows[h, token] = attend(layer, q[h, token], k[h // group], v[h // group]) * gates[token, 1, h]
        for number, cube in enumerate(cubes):
            scores = k_c[h // group] @ q_c[h, number]
            chosen = best(dict(enumerate(scores.tolist())), layer.chosen)
            keys = [*range(text), *sorted(token for other in chosen for token in cubes[other])]
            coarse = attend(layer, q_c[h, number], k_c[h // group], v_c[h // group])
            for token in cube:
                live[h, token, keys] = True
                fine = attend(layer, q[h, token], k[h // group, keys], v[h // group, keys])
                rows[h, token] = coarse * gates[token, 0, h] + fine * gates[token, 1, h]
    out = torch.stack([torch.cat([rows[h, token] for h in range(layer.num_heads)]) for token in range(n)])
    return layer.out(out), live, None
