#!/usr/bin/env python3
"""The same model in PyTorch, in the forms that its users would write, timed on the rows of jetlag's bench program.

What is measured: the whole step. A training row is forward, backward and AdamW on B windows of T tokens; an evaluation
row is forward and mean loss, in inference mode. Weights, tokens and settings come from the folder that
`bench --inputs DIR` writes, so a row's losses can be compared with jetlag's.

The forms:

    eager          scores as a (B, H, T, T) tensor: matmul, bias or mask, softmax, matmul
    sdpa           scaled_dot_product_attention: is_causal for a method without a lag bias, else the bias as its mask
    compile_eager  torch.compile of eager
    compile_sdpa   torch.compile of sdpa
    flex           eager with a compiled FlexAttention: the score_mod reads the lag's entry of the bias table, and the
                   block mask skips what is not causal
    tuned_eager    eager as an expert of PyTorch's memory would have it
    tuned_sdpa     the same of sdpa

A lag bias is one (H, T) table per layer and step in every form. The first forms index it by the lags of all pairs, which
makes an (H, T, T) matrix; the tuned ones do without: with the keys in reverse order the matrix is a Hankel matrix, an
overlapping view of the padded table that takes no memory, and the fused kernel of SDPA reads it as a mask. The tuned forms
also keep freed memory for the next tensor, in huge pages where the system has them: by default the C library gives
tensors of megabytes back to the system and gets them anew, zeroed page by page, which can double eager's time.

How PyTorch is kept from a handicap:

  - Rotary tables, masks and the powers of the lag that a lag bias is made of are built once, outside the clock.
  - Fused AdamW, float32 throughout, no copies besides those PyTorch makes for its kernels, warm-up passes before the
    clock starts (compilation falls in the first of them).

A row that needs more memory than there is is skipped before it can make the machine swap, and a form that this PyTorch
cannot run on a CPU says so in place of a time.
"""

import argparse
import ctypes
import json
import math
import os
import platform
import re
import statistics
import struct
import sys
import time

if any(argument.removeprefix("--form=").startswith("tuned_") for argument in sys.argv):
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages; PyTorch reads it once, so before the import

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    sys.exit(f"torch_baseline: error: {error} (for PyTorch: python3 -m pip install torch)")

FORMS = ["eager", "sdpa", "compile_eager", "compile_sdpa", "flex", "tuned_eager", "tuned_sdpa"]

# Position methods: the rotary kind, and the sectors of the learned lag bias ("alibi": the fixed one).
METHODS = {
    "none": (None, None),
    "rope": ("rope", None),
    "rope_pi": ("pi", None),
    "rope_ntk": ("ntk", None),
    "rope_yarn": ("yarn", None),
    "pj_rotary": ("jordan", None),
    "affine": (None, ["affine"]),
    "rope_affine": ("rope", ["affine"]),
    "rope_ntk_affine": ("ntk", ["affine"]),
    "rope_yarn_affine": ("yarn", ["affine"]),
    "fj_affine": (None, ["fj", "affine"]),
    "fj_lc": (None, ["fj", "lc"]),
    "lc_affine": (None, ["affine", "lc"]),
    "full": (None, ["fj", "affine", "lc"]),
    "grape_m_rope": ("rope", None),
    "grape_a_alibi": (None, ["affine"]),
    "grape_ma_rope_alibi": ("rope", ["affine"]),
    "alibi": (None, "alibi"),
}
SECTORS = ["fj", "affine", "lc"]
LOSS_STEPS = 3  # a training row reports the losses of this many steps
VOCAB = 256  # tokens are bytes


# ----------------------------------------------------------------------------------------------------------------------
# Inputs


def read_checkpoint(path):
    """Tensors by name and the configuration of a safetensors file: a length, a JSON header, then the data."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            data = bytearray(file.read())
    except (struct.error, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: is not a safetensors file ({error})") from None
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        if info["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {info['dtype']}, wanted F32")
        # A clone, because AdamW must not write into the bytes of the file, whose alignment is arbitrary besides.
        tensors[name] = torch.frombuffer(data[begin:end], dtype=torch.float32).reshape(info["shape"]).clone()
    return tensors, json.loads(metadata["config"])


def windows(tokens, first, B, T):
    """Inputs and targets (B, T) of the windows first .. first + B - 1."""
    starts = [(w * T) % (len(tokens) - T) for w in range(first, first + B)]
    rows = torch.stack([tokens[s : s + T + 1] for s in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Position methods. What does not depend on parameters is made once per length, in double, and stored as float.


def rotary_angles(kind, T, L, D, base):
    """Angles (T, D/2) in radians, and the gain of q and k."""
    position = torch.arange(T, dtype=torch.float64)
    pair = torch.arange(D // 2, dtype=torch.float64)
    stretch = T / L
    gain = 1.0
    if kind == "jordan":
        pair, pairs = pair.div(2, rounding_mode="floor"), D / 4
    else:
        pairs = D / 2
    if kind == "ntk" and T > L and D > 2:
        base *= stretch ** (D / (D - 2))
    if kind == "pi" and T > L:
        position *= (L - 1) / (T - 1)
    frequency = base ** (-pair / pairs)
    if kind == "yarn" and T > L:
        turns = L * frequency / (2 * math.pi)
        keep = ((turns - 1) / (32 - 1)).clamp(0, 1)
        frequency = frequency / stretch * (1 - keep) + frequency * keep
        gain = 1 + 0.1 * math.log(stretch)
    return position[:, None] * frequency, gain


def rotary_constants(kind, T, L, D, base):
    angle, gain = rotary_angles(kind, T, L, D, base)
    turn = torch.polar(torch.full_like(angle, gain), angle)
    constants = {
        "turn": turn.to(torch.complex64),  # (T, D/2)
        "cos": turn.real.float().contiguous(),
        "sin": turn.imag.float().contiguous(),
    }
    if kind == "jordan":
        constants["shear"] = (torch.arange(T, dtype=torch.float64) / L).float().view(T, 1, 1, 1)
    return constants


def shear_queries_and_keys(qk, shear):
    """qk: (B, T, 2, H, D). In each group of four channels (z0, z1): query z0 += c z1, key z1 -= c z0."""
    q, k = (x.unflatten(-1, (-1, 2, 2)) for x in qk.unbind(2))
    q0, q1 = q.unbind(-2)
    k0, k1 = k.unbind(-2)
    q = torch.stack((q0 + shear * q1, q1), -2)
    k = torch.stack((k0, k1 - shear * k0), -2)
    return torch.stack((q, k), 2).flatten(-3)


def rotate(qk, constants, compiled):
    """qk: (B, T, 2, H, D). Turns each pair of channels (2p, 2p+1).

    Complex numbers are the quick way in eager mode; the compiler has no code for them, but fuses real arithmetic.
    """
    pairs = qk.unflatten(-1, (-1, 2))
    if not compiled:
        turned = torch.view_as_complex(pairs) * constants["turn"][:, None, None, :]
        return torch.view_as_real(turned).flatten(-2)
    cos, sin = constants["cos"][:, None, None, :], constants["sin"][:, None, None, :]
    x, y = pairs.unbind(-1)
    return torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)


def lag_constants(T, L, orders):
    """What the learned lag bias is made of, for the lags 0 .. T - 1."""
    lag = torch.arange(T, dtype=torch.float64)
    x = lag / L
    beta = lag / (lag * lag + L * L).sqrt()
    constants = {
        "lag": lag,
        "x": x,
        "log_lag": L * torch.asinh(x),
        "fj_powers": torch.stack([x**r / math.factorial(r) for r in range(orders)]),  # (R + 1, T)
        "lc_powers": torch.stack([beta**r for r in range(orders)]),
    }
    return {name: tensor.float() for name, tensor in constants.items()}


def jet(p, sector, lag, powers):
    """sum_r alpha_r powers_r (re_r cos(omega lag) - im_r sin(omega lag)), (H, T)."""
    alpha = p[sector + "_alpha_logits"].softmax(-1)
    angle = p["omega"][:, None] * lag
    real = (alpha * p[sector + "_zeta_re"]) @ powers
    imaginary = (alpha * p[sector + "_zeta_im"]) @ powers
    return real * angle.cos() - imaginary * angle.sin()


def lag_bias_table(p, sectors, c):
    """The learned lag bias (H, T) of one layer; p: its parameters, c: lag_constants."""
    gates = p["gate_logits"] + c["sector_mask"]
    gate = dict(zip(SECTORS, gates.softmax(-1)[..., None].unbind(1)))  # each (H, 1)
    parts = []
    if "fj" in sectors:
        envelope = (-F.softplus(p["raw_fj_damping"])[:, None] * c["x"]).exp()
        parts.append(gate["fj"] * envelope * jet(p, "fj", c["lag"], c["fj_powers"]))
    if "affine" in sectors:
        parts.append((-gate["affine"] * F.softplus(p["raw_affine_slope"])[:, None]) * c["x"])
    if "lc" in sectors:
        parts.append(gate["lc"] * jet(p, "lc", c["log_lag"], c["lc_powers"]))
    return sum(parts)


def alibi_table(heads, T):
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]
    return (-torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(T)).float()


# ----------------------------------------------------------------------------------------------------------------------
# Attention. q, k, v: (B, H, T, D); table: (H, T), the bias of each lag, or None.


def hankel_bias(table):
    """(H, T, T): the bias of query i and the key at place j' of the reversed keys, -inf where that key lies ahead.

    With j = T - 1 - j' the lag is i - j = i + j' - (T - 1), so row i is the padded table from i on: a view.
    """
    H, T = table.shape
    padded = F.pad(table, (T - 1, 0), value=-math.inf)
    return padded.as_strided((H, T, T), (2 * T - 1, 1, 1))


def indexed_bias(table, constants):
    """(H, T, T): the bias of each pair, -inf for keys ahead."""
    return F.pad(table, (0, 1), value=-math.inf)[:, constants["lag_index"]]


def attend_eager(q, k, v, table, constants):
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    scores += constants["causal"] if table is None else indexed_bias(table, constants)
    return scores.softmax(-1) @ v


def attend_sdpa(q, k, v, table, constants):
    if table is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=indexed_bias(table, constants))


def attend_tuned_eager(q, k, v, table, constants):
    if table is None:
        return attend_eager(q, k, v, table, constants)
    scores = q * q.shape[-1] ** -0.5 @ k.flip(2).mT
    scores += hankel_bias(table)
    return scores.softmax(-1) @ v.flip(2)


def attend_tuned_sdpa(q, k, v, table, constants):
    if table is None:
        return attend_sdpa(q, k, v, table, constants)
    # The fused kernel takes masks of two or four dimensions only.
    return F.scaled_dot_product_attention(q, k.flip(2), v.flip(2), attn_mask=hankel_bias(table)[None])


def make_attend_flex():
    """FlexAttention as its documentation has it: flex_attention itself is compiled, and called from eager code.

    Compiled as one with the whole model it fails on a CPU in PyTorch 2.15, or gives wrong values where q and k are
    views of one buffer.
    """
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend_flex(q, k, v, table, constants):
        score_mod = None
        if table is not None:

            def score_mod(score, b, h, i, j):
                return score + table[h, i - j]

        return compiled(q, k, v, score_mod=score_mod, block_mask=constants["block_mask"])

    return attend_flex


def causal_block_mask(T):
    """Row block n sees the blocks before n in full, and block n through the mask.

    Written down, because PyTorch's create_block_mask finds it by evaluating all T x T pairs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size = 128
    blocks = (T + size - 1) // size
    row = torch.arange(blocks, dtype=torch.int32)
    partial = torch.zeros(blocks, blocks, dtype=torch.int32)
    partial[:, 0] = row
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, blocks, dtype=torch.int32),
        partial[None, None],
        row[None, None],
        row.expand(1, 1, blocks, blocks).contiguous(),
        BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(T, T),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The model


def make_constants(config, T, form):
    """Everything of one length that does not depend on parameters."""
    model, L = config["model"], config["train"]["context"]
    H, D = model["heads"], model["embed_dim"] // model["heads"]
    rotary, sectors = METHODS[model["position"]]
    constants = {}
    if rotary is not None:
        constants.update(rotary_constants(rotary, T, L, D, model["rope_base"]))
    if sectors == "alibi":
        constants["table"] = alibi_table(H, T)
    elif sectors is not None:
        constants.update(lag_constants(T, L, model["max_order"] + 1))
        constants["sector_mask"] = torch.tensor([0.0 if s in sectors else -math.inf for s in SECTORS])
    elif form.endswith("eager"):
        constants["causal"] = torch.full((T, T), -math.inf).triu_(1)
    if sectors is not None and form in ("eager", "sdpa", "compile_eager", "compile_sdpa"):
        position = torch.arange(T)
        lag = position[:, None] - position
        constants["lag_index"] = torch.where(lag < 0, T, lag)
    if form == "flex":
        constants["block_mask"] = causal_block_mask(T)
    return constants


def loss_function(config, form):
    """A function (parameters, constants, inputs, targets) -> mean cross-entropy, for one form."""
    model = config["model"]
    C, H, layers = model["embed_dim"], model["heads"], model["layers"]
    rotary, sectors = METHODS[model["position"]]
    compiled = form.startswith("compile_")
    if form == "flex":
        attend = make_attend_flex()
    else:
        attend = {
            "eager": attend_eager,
            "sdpa": attend_sdpa,
            "tuned_eager": attend_tuned_eager,
            "tuned_sdpa": attend_tuned_sdpa,
        }[form.removeprefix("compile_")]

    def attention(p, x, constants):
        B, T, _ = x.shape
        qkv = F.linear(x, p["qkv.weight"], p["qkv.bias"]).view(B, T, 3, H, C // H)
        qk, v = qkv[:, :, :2], qkv[:, :, 2]
        if rotary == "jordan":
            qk = shear_queries_and_keys(qk, constants["shear"])
        if rotary is not None:
            qk = rotate(qk, constants, compiled)
        table = constants.get("table")
        if sectors is not None and table is None:
            table = lag_bias_table(under(p, "pj_bias."), sectors, constants)
        q, k = qk.unbind(2)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), table, constants)
        return F.linear(y.transpose(1, 2).reshape(B, T, C), p["out_proj.weight"], p["out_proj.bias"])

    def loss(p, constants, inputs, targets):
        x = F.embedding(inputs, p["embedding.weight"])
        for n in range(layers):
            b = under(p, f"blocks.{n}.")
            y = F.layer_norm(x, (C,), b["norm1.weight"], b["norm1.bias"])
            x = x + attention(under(b, "attn."), y, constants)
            y = F.layer_norm(x, (C,), b["norm2.weight"], b["norm2.bias"])
            y = F.gelu(F.linear(y, b["mlp.0.weight"], b["mlp.0.bias"]))
            x = x + F.linear(y, b["mlp.2.weight"], b["mlp.2.bias"])
        x = F.layer_norm(x, (C,), p["norm.weight"], p["norm.bias"])
        logits = F.linear(x, p["head.weight"], p["head.bias"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    # One graph for this one shape; a graph break would be an error here, not a silent loss of speed.
    return torch.compile(loss, dynamic=False, fullgraph=True) if compiled else loss


def under(p, prefix):
    return {name[len(prefix) :]: tensor for name, tensor in p.items() if name.startswith(prefix)}


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def proc_bytes(path, key):
    """The value of a line "KEY: N kB"; None where the system has no such file or line."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_peak_memory():
    """Sets VmHWM, the peak of resident memory, back to what is resident now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def keep_freed_memory():
    """Tells glibc's malloc to map nothing apart and to give nothing back; other C libraries have no such call."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError, TypeError):
        pass


def bytes_needed(config, kind, form, B, T):
    """About what the pass holds at its peak, counting only what has T x T elements or a row per token."""
    model = config["model"]
    H, C, layers = model["heads"], model["embed_dim"], model["layers"]
    sectors = METHODS[model["position"]][1]
    scores = 4 * B * H * T * T
    training = kind == "train"
    need = 4 * B * T * (C * (30 * layers if training else 16) + 4 * VOCAB)
    # With a learned bias to differentiate, scaled_dot_product_attention keeps its scores like eager attention.
    if form.endswith("eager") or (form.endswith("sdpa") and training and sectors not in (None, "alibi")):
        need += scores * (layers + 6 if training else 3)
    if sectors is not None and not form.startswith("tuned_") and form != "flex":
        need += (4 * H * 2 + 8) * T * T
    return need


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def reason(error):
    """One line on why: that of the first cause, since the compiler wraps what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    wrapped = re.search(r"raised exception (\w+)\(['\"](.*)['\"]\)", lines[0])
    kind, text = (wrapped[1], wrapped[2]) if wrapped else (type(error).__name__, lines[0])
    return f"{kind}: {text.split('. ')[0]}"[:160]


def timed(run):
    begin = time.perf_counter()
    loss = run()
    return time.perf_counter() - begin, loss.item()


def measure(name, kind, config, tensors, tokens, T, B, options):
    """One row. `run(n)` below is pass n; passes before `warmup` are not timed, but give the losses."""
    row = {"name": name, "kind": kind, "method": config["model"]["position"], "T": T, "B": B, "form": options.form}
    row.update(seconds=[], median=None, losses=[], peak_memory_bytes=None, status="ok")
    row["base_memory_bytes"] = proc_bytes("/proc/self/status", "VmRSS")  # PyTorch itself and the weights
    need, available = bytes_needed(config, kind, options.form, B, T), proc_bytes("/proc/meminfo", "MemAvailable")
    if available is not None and need > 0.9 * available:
        row["status"] = f"skipped: needs about {need / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free"
        return row

    compiled = options.form == "flex" or options.form.startswith("compile_")
    reset_peak_memory()
    try:
        if compiled:
            torch.compiler.reset()  # what earlier rows compiled counts against a limit
        constants = make_constants(config, T, options.form)
        loss_of = loss_function(config, options.form)
        if kind == "train":
            run = training_pass(config, tensors, tokens, constants, loss_of, T, B)
            warmup = max(LOSS_STEPS, options.warmup)
        else:
            run = evaluation_pass(tensors, tokens, constants, loss_of, T, B)
            warmup = max(1, options.warmup)
    except (ImportError, AttributeError) as error:  # an older PyTorch
        row["status"] = f"unsupported: {reason(error)}"
        return row
    for n in range(warmup + options.repeat):
        try:
            seconds, loss = run(n)
        except Exception as error:
            # What cannot be compiled or has no kernel for this machine shows in the first pass.
            if "allocate memory" in str(error):
                row["status"] = "skipped: not enough memory"
            elif n == 0 and (compiled or isinstance(error, AttributeError)):
                row["status"] = f"unsupported: {reason(error)}"
            else:
                raise
            return row
        if len(row["losses"]) < (LOSS_STEPS if kind == "train" else 1):
            row["losses"].append(loss)
        if compiled and n == 0:
            row["first_pass_seconds"] = seconds  # compilation, mostly: not held against the limit
            reset_peak_memory()
        elif options.limit and seconds > options.limit:
            row["seconds"].append(seconds)
            row["status"] = "over the limit"
            break
        elif n >= warmup:
            row["seconds"].append(seconds)
    row["median"] = statistics.median(row["seconds"])
    row["peak_memory_bytes"] = proc_bytes("/proc/self/status", "VmHWM")
    return row


def training_pass(config, tensors, tokens, constants, loss_of, T, B):
    p = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    train = config["train"]
    settings = {
        "lr": train["lr"],
        "betas": (train["beta1"], train["beta2"]),
        "eps": train["eps"],
        "weight_decay": train["weight_decay"],
    }
    try:
        optimizer = torch.optim.AdamW(p.values(), fused=True, **settings)
    except (RuntimeError, TypeError):  # older PyTorch fuses on a GPU only, or not at all
        optimizer = torch.optim.AdamW(p.values(), **settings)

    def run(step):
        inputs, targets = windows(tokens, step * B, B, T)

        def one_step():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(p, constants, inputs, targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return timed(one_step)

    return run


def evaluation_pass(tensors, tokens, constants, loss_of, T, B):
    inputs, targets = windows(tokens, 0, B, T)

    @torch.inference_mode()
    def run(_):
        return timed(lambda: loss_of(tensors, constants, inputs, targets))

    return run


# ----------------------------------------------------------------------------------------------------------------------
# The program


def versions():
    info = {"python": platform.python_version(), "torch": torch.__version__}
    for line in torch.__config__.show().splitlines():
        for key, pattern in (("mkl", r"Math Kernel Library Version (\S+)"), ("onednn", r"MKL-DNN v(\S+)")):
            found = re.search(pattern, line)
            if found:
                info[key] = found[1]
    if hasattr(torch.backends, "cpu"):
        info["simd"] = torch.backends.cpu.get_cpu_capability()
    return info


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def parse_rows(text, folder):
    """(name, kind, method, T, B) of each row asked for; METHOD in KIND/METHOD/Tn/Bn may be a regular expression."""
    rows = []
    for item in text.split(","):
        found = re.fullmatch(r"(train|eval)/([^/]+)/T(\d+)/B(\d+)", item)
        if not found:
            sys.exit(f"torch_baseline: error: --rows {item}: wanted train/METHOD/Tn/Bn or eval/METHOD/Tn/Bn")
        kind, pattern, T, B = found[1], found[2], int(found[3]), int(found[4])
        if T < 1 or B < 1:
            sys.exit(f"torch_baseline: error: --rows {item}: wanted T and B of at least 1")
        try:
            methods = [m for m in METHODS if re.fullmatch(pattern, m)]
        except re.error as error:
            sys.exit(f"torch_baseline: error: --rows {item}: {error}")
        methods = [m for m in methods if os.path.exists(os.path.join(folder, m + ".safetensors"))]
        if not methods:
            sys.exit(f"torch_baseline: error: --rows {item}: no METHOD.safetensors in {folder} matches {pattern}")
        rows += [(f"{kind}/{m}/T{T}/B{B}", kind, m, T, B) for m in methods]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--inputs", required=True, help="folder written by bench --inputs DIR")
    parser.add_argument("--rows", required=True, help="rows, as train/rope/T1024/B8,eval/rope.*/T8192/B1")
    parser.add_argument("--form", required=True, choices=FORMS)
    parser.add_argument("--repeat", type=int, default=5, help="timed passes per row (default: 5)")
    parser.add_argument("--warmup", type=int, default=2, help="passes before them (default: 2; training: at least 3)")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: PyTorch's choice)")
    parser.add_argument("--limit", type=float, default=0, help="end a row once a pass takes more seconds")
    parser.add_argument("--json", help="write the rows to this file")
    parser.error = lambda message: sys.exit(f"torch_baseline: error: {message}")  # one line, without the usage
    options = parser.parse_args()
    for name, least in (("repeat", 1), ("warmup", 0), ("threads", 0), ("limit", 0)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name}: wanted at least {least}")
    if options.json and not os.path.isdir(os.path.dirname(os.path.abspath(options.json))):
        parser.error(f"--json {options.json}: there is no such folder")

    if options.form.startswith("tuned_"):
        keep_freed_memory()
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    rows = parse_rows(options.rows, options.inputs)
    with open(os.path.join(options.inputs, "tokens.bin"), "rb") as file:
        data = bytearray(file.read())
    if not data:
        sys.exit(f"torch_baseline: error: {file.name} is empty")
    tokens = torch.frombuffer(data, dtype=torch.uint8)

    results = []
    for name, kind, method, T, B in rows:
        if T >= len(tokens):
            sys.exit(f"torch_baseline: error: {name}: tokens.bin has {len(tokens)} tokens, wanted more than {T}")
        tensors, config = read_checkpoint(os.path.join(options.inputs, method + ".safetensors"))
        if config["model"].get("position") != method:
            sys.exit(f"torch_baseline: error: {method}.safetensors holds another method, or a composed one")
        row = measure(name, kind, config, tensors, tokens, T, B, options)
        results.append(row)
        time_text = "" if row["median"] is None else f"{row['median']:.4g} s"
        print(f"{name}  {options.form}  {time_text}  {row['status']}", flush=True)
    if options.json:
        machine = {"cpu": cpu_name(), "threads": torch.get_num_threads()}
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "versions": versions(), "rows": results}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError, KeyError, struct.error) as error:
        # Inputs that are missing, cut short or no checkpoints; an output that cannot be written.
        sys.exit(f"torch_baseline: error: {reason(error)}")
