#!/usr/bin/env python3
"""Times PyTorch's attention on a GPU, forward and backward, on the rows attention_forward and attention_backward of
jetlag's bench program (4 heads of 64 channels, in its precision), and prints each beside jetlag's time.

    sdpa    scaled_dot_product_attention, causal: a method without a lag bias (rope, whose rotation is not counted)
    flex    compiled FlexAttention whose score_mod reads the lag's entry of a learned (H, T) table (full)

    bench/torch_attention.py --jetlag bench.json
"""

import argparse
import json
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError as error:
    sys.exit(f"torch_attention: error: {error}")

H, D = 4, 64
SHAPES = [(1024, 8), (8192, 1), (32768, 1)]  # T, B


def seconds(run, repeat):
    """The median time of one run, after two that do not count."""
    times = []
    for i in range(repeat + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def measure(attend, inputs, B, T, repeat):
    """Forward, and forward with backward less forward."""
    q, k, v = inputs[:3]

    def forward():
        with torch.no_grad():
            attend(q, k, v)

    dout = torch.randn(B, H, T, D, device="cuda", dtype=q.dtype)

    def both():
        torch.autograd.grad(attend(q, k, v), inputs, dout)

    once = seconds(forward, repeat)
    return once, seconds(both, repeat) - once


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jetlag", required=True, help="what bench --json wrote")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with open(options.jetlag) as file:
        measured = json.load(file)
    jetlag = {row["name"]: row["median"] for row in measured["rows"]}
    precision = measured["machine"].get("precision", "fp32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    if not torch.cuda.is_available():
        sys.exit("torch_attention: error: PyTorch sees no GPU")
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {precision}")
    flex = torch.compile(flex_attention)
    for T, B in SHAPES:
        q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        bias = torch.randn(H, T, device="cuda", requires_grad=True)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")

        def by_lag(score, b, h, i, j):
            return score + bias[h, torch.clamp(i - j, min=0)]

        forms = {
            "sdpa": ("rope", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)),
            "flex": ("full", lambda q, k, v: flex(q, k, v, score_mod=by_lag, block_mask=mask), (q, k, v, bias)),
        }
        for form, (method, attend, inputs) in forms.items():
            try:
                times = measure(attend, inputs, B, T, options.repeat)
            except Exception as error:  # a form that this PyTorch cannot run
                print(f"{form:5} T{T} B{B}  failed: {str(error).splitlines()[0][:100]}")
                continue
            for way, time in zip(("forward", "backward"), times):
                own = jetlag.get(f"attention_{way}/{method}/T{T}/B{B}/D{D}")
                beside = f"  jetlag {own * 1e3:9.3f} ms  {time / own:6.2f} x" if own else ""
                print(f"{form:5} {way:8} T{T} B{B}  {time * 1e3:9.3f} ms{beside}", flush=True)


if __name__ == "__main__":
    main()
