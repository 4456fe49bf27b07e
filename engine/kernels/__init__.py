"""Fused operations of a decode step: for each a torch twin and a Triton kernel, one folder an op.

``<op>/reference.py`` is the meaning and the CPU runtime, ``<op>/kernel.py`` the GPU kernel (imports
triton), ``<op>/__init__.py`` chooses: ``auto`` takes the kernel for CUDA tensors and the twin
otherwise; ``torch`` and ``triton`` ask for one. On CPU tensors ``triton`` means Triton's
interpreter, a test device that must be asked for: TRITON_INTERPRET=1 in the environment before
triton is imported. ``dispatch.using("triton")`` turns every ``auto`` of a block of code into it.

Rules of the kernels (facts/kv-attention.md 5.1): every load becomes fp32 at once, since bf16
arithmetic is silently wrong in the interpreter; addresses are 64-bit; every dimension that can
overrun is masked, values too, since 0 times the NaN of a freed block is NaN; division is IEEE and
contraction off where bits must equal torch's. ``launch.launches`` counts launches by op.

A decode step of one layer: ``kv_append``; ``kv_quantise_block`` when a block leaves the hot zone;
``code_scan`` over the far zone; ``topk_select`` candidates; ``gathered_scores`` of them and
``topk_select`` again; ``gathered_attn`` for the chosen, ``decode_attn_tiered`` (latent attention:
``decode_attn_latent``) for sink and window, ``summary_attn`` for the rest if it is on; and
``lse_merge`` of the parts.
"""
