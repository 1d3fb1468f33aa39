"""Stage 0: what the card is, and with which driver, libraries and compilers torch uses it."""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench.output import markdown_table
from bench.qualifying.session import Session
from deskgpt.compute import compiling
from deskgpt.machine import hardware, peak_flops, provenance

# What nvidia-smi is asked: its name for the field, ours.
QUERIED = {
    "driver_version": "driver",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def measure(s: Session) -> dict[str, Any]:
    device = s.device
    published = {dtype: peak_flops.published_flops(device, dtype) for dtype in hardware.DTYPES}
    return {
        "device": hardware.device_name(device),
        **card(device),
        **nvidia_smi(device),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl_version(),
        "triton": compiling.triton_name(),
        "cpp_compiler": compiling.cpp_compiler_name(),
        "inductor_cache": inductor_cache(),
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "published": published,
        "fast_dtype": peak_flops.fast_dtype(device),
        "sdpa_order": [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()],
        "sdpa_enabled": sdpa_enabled(),
        "sdpa_chosen": sdpa_chosen(s),
    }


def card(device: torch.device) -> dict[str, Any]:
    """What torch knows about the card; of another device only its memory."""
    facts: dict[str, Any] = dict.fromkeys(("compute_capability", "sms", "l2_bytes", "free_bytes"))
    facts["memory_bytes"] = hardware.memory_bytes(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["sms"] = properties.multi_processor_count
        facts["l2_bytes"] = properties.L2_cache_size
        facts["free_bytes"] = torch.cuda.mem_get_info(device)[0]
    return facts


def nvidia_smi(device: torch.device) -> dict[str, Any]:
    """What only the driver knows; None where there is no nvidia-smi, or where it has no answer."""
    if device.type != "cuda":
        return dict.fromkeys(QUERIED.values())
    # nvidia-smi and torch may number the cards differently.
    return query_nvidia_smi(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def query_nvidia_smi(card_id: str) -> dict[str, Any]:
    """The fields of QUERIED for one card; numbers as float."""
    facts: dict[str, Any] = dict.fromkeys(QUERIED.values())
    command = ["nvidia-smi", f"--id={card_id}", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return facts
    for name, text in zip(QUERIED.values(), done.stdout.strip().split(", "), strict=False):
        if name == "driver":
            facts[name] = text
            continue
        try:
            facts[name] = float(text)
        except ValueError:  # "[N/A]", "[Not Supported]"
            facts[name] = None
    return facts


def nccl_version() -> str | None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def inductor_cache() -> str:
    """The folder of compiled code, without the user's name."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir().replace(str(Path.home()), "~").replace(getpass.getuser(), "USER")


def sdpa_enabled() -> dict[str, bool]:
    """Whether torch may use each of its backends for attention on CUDA."""
    return {
        "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled(),
        "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled(),
        "MATH": torch.backends.cuda.math_sdp_enabled(),
    }


def sdpa_chosen(s: Session) -> list[dict[str, str]]:
    """The backend that torch takes for the model's attention, by dtype: in training, and for one token after others."""
    c = s.sizes.model
    T = c.block_size
    rows = []
    for dtype in hardware.DTYPES:
        options: dict[str, Any] = {"dtype": hardware.DTYPES[dtype], "device": s.device}
        qkv = torch.zeros(1, T, 3 * c.n_embd, **options).requires_grad_()
        q, k, v = (x.view(1, T, c.n_head, -1).transpose(1, 2) for x in qkv.split(c.n_embd, 2))  # (1, H, T, D)
        chosen = torch._fused_sdp_choice(q, k, v, is_causal=True)
        rows.append({"dtype": dtype, "attention": "training", "backend": SDPBackend(chosen).name})

        cache = torch.zeros(2, 1, c.n_head, T, c.n_embd // c.n_head, **options)
        for length in (T // 2 + 1, T):
            keys, values = cache[:, :, :, :length]
            chosen = torch._fused_sdp_choice(q[:, :, -1:].detach(), keys, values)
            rows.append({"dtype": dtype, "attention": f"one token, {length} keys", "backend": SDPBackend(chosen).name})
    return rows


# ---- as Markdown ---------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    facts = [[name, with_unit_or_na(result[key], unit, scale)] for name, key, unit, scale in SHOWN]
    facts += [[name, version] for name, version in result["versions"].items()]
    for dtype, peak in result["published"].items():
        said = "n/a" if peak is None else f"{peak[0] / 1e12:.4g} TFLOP/s ({peak[1]})"
        facts.append([f"published peak, {dtype}", said])
    enabled = ", ".join(name for name, on in result["sdpa_enabled"].items() if on)
    order = ", ".join(result["sdpa_order"])
    dtypes = list(result["published"])
    table = []
    for what in dict.fromkeys(row["attention"] for row in result["sdpa_chosen"]):
        backends = {row["dtype"]: row["backend"] for row in result["sdpa_chosen"] if row["attention"] == what}
        table.append([what, *(backends[dtype] for dtype in dtypes)])
    return "\n\n".join(
        [
            markdown_table(["fact", "value"], facts, left_columns=2),
            f"Backends of `scaled_dot_product_attention`, enabled: {enabled}; order: {order}. Chosen:",
            markdown_table(["attention", *dtypes], table, left_columns=1 + len(dtypes)),
        ]
    )


# Name on the page, key of the result, unit, what the figure is divided by.
SHOWN = (
    ("device", "device", "", 1),
    ("compute capability", "compute_capability", "", 1),
    ("SMs", "sms", "", 1),
    ("memory", "memory_bytes", "GiB", 2**30),
    ("free memory", "free_bytes", "GiB", 2**30),
    ("L2 cache", "l2_bytes", "MiB", 2**20),
    ("driver", "driver", "", 1),
    ("clock", "clock_mhz", "MHz", 1),
    ("highest clock", "max_clock_mhz", "MHz", 1),
    ("memory clock", "memory_clock_mhz", "MHz", 1),
    ("highest memory clock", "max_memory_clock_mhz", "MHz", 1),
    ("power", "power_w", "W", 1),
    ("power limit", "power_limit_w", "W", 1),
    ("temperature", "temperature_c", "°C", 1),
    ("cuDNN", "cudnn", "", 1),
    ("NCCL", "nccl", "", 1),
    ("Triton", "triton", "", 1),
    ("C++ compiler", "cpp_compiler", "", 1),
    ("compiled code", "inductor_cache", "", 1),
    ("commit", "git_commit", "", 1),
    ("dtype that --dtype=auto takes", "fast_dtype", "", 1),
)


def with_unit_or_na(value: Any, unit: str, scale: float) -> str:
    if value is None:
        return "n/a"
    return f"{value / scale:.5g} {unit}" if unit else str(value)
