"""Stage 0: what the card is, and with which driver, libraries and compilers torch uses it."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench.output import markdown_table
from bench.qualifying.session import Session
from deskgpt.compute import compiling
from deskgpt.system import hardware, peaks, provenance

# What nvidia-smi is asked, and the name on the page.
QUERIED = {
    "driver_version": "driver",
    "clocks.sm": "clock",
    "clocks.max.sm": "highest clock",
    "power.limit": "power limit",
}


def measure(s: Session) -> dict[str, Any]:
    """The facts by their names on the page, as text; None if the device has no such thing or does not say."""
    device = s.device
    facts: dict[str, str | None] = {"device": hardware.device_name(device), **card(device), **nvidia_smi(device)}
    facts |= {"NCCL": nccl_version(), "cuDNN": str(torch.backends.cudnn.version() or "n/a")}
    facts |= {"Triton": compiling.triton_name(), "C++ compiler": compiling.cpp_compiler_name()}
    facts |= provenance.versions() | {"commit": provenance.git_commit()}
    for dtype in hardware.DTYPES:
        peak = peaks.published_flops(device, dtype)
        facts[f"published peak, {dtype}"] = f"{peak[0] / 1e12:.4g} TFLOP/s ({peak[1]})" if peak else None
        facts[f"attention in {dtype}"] = attention_backend(s, dtype)
    facts["dtype that --dtype=auto takes"] = peaks.fast_dtype(device)
    return {"facts": facts}


def card(device: torch.device) -> dict[str, str | None]:
    """What torch knows about the card; of another device only its memory."""
    memory_bytes = hardware.memory_bytes(device)
    facts = {"memory": f"{memory_bytes / 2**30:.5g} GiB" if memory_bytes else None}
    if device.type != "cuda":
        return facts | dict.fromkeys(("free memory", "compute capability", "SMs"))
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "free memory": f"{torch.cuda.mem_get_info(device)[0] / 2**30:.5g} GiB",
        "compute capability": f"{properties.major}.{properties.minor}",
        "SMs": str(properties.multi_processor_count),
    }


def nvidia_smi(device: torch.device) -> dict[str, str | None]:
    """What only the driver knows; None if there is no nvidia-smi, or where it has no answer."""
    if device.type != "cuda":
        return dict.fromkeys(QUERIED.values())
    # nvidia-smi and torch may number the cards differently.
    return query_nvidia_smi(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def query_nvidia_smi(card_id: str) -> dict[str, str | None]:
    command = ["nvidia-smi", f"--id={card_id}", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(QUERIED.values())
    answers = [None if answer.startswith("[") else answer for answer in done.stdout.strip().split(", ")]
    return dict(zip(QUERIED.values(), answers, strict=False))  # "[N/A]", "[Not Supported]"


def nccl_version() -> str | None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def attention_backend(s: Session, dtype: str) -> str:
    """The backend that torch takes for the model's attention in training."""
    c = s.sizes.model
    options: dict[str, Any] = {"dtype": hardware.DTYPES[dtype], "device": s.device}
    qkv = torch.zeros(1, c.block_size, 3 * c.n_embd, **options).requires_grad_()
    q, k, v = (x.view(1, c.block_size, c.n_head, -1).transpose(1, 2) for x in qkv.split(c.n_embd, 2))  # (1, H, T, D)
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name


def describe(result: dict[str, Any]) -> str:
    rows = [[name, "n/a" if value is None else value] for name, value in result["facts"].items()]
    return markdown_table(["fact", "value"], rows, left_columns=2)
