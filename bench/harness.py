"""lm_eval, the harness that published figures come from: a GPT as its backend, and its tasks.

The backend answers as `lm_eval --model hf` does with the same weights in Hugging Face's format: the same tokens, the
same truncation from the left, the same stop texts. It asks model.py itself and not an exported class, so that a changed
model is measured as it is. bench/evaluate.py imports this file late: lm_eval is optional and takes seconds to import.

Shape legend: B batch, T time, C channels, N tokens of continuations, V vocabulary.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from data.tokenizer import Tokenizer
from deskgpt.compute.generation import Sample
from model import GPT

END_OF_TEXT = "<|endoftext|>"  # the end_of_text of all tokenizers, as text
MAX_NEW_TOKENS = 256  # for tasks that name no number, as in lm_eval's hf
LOGITS_PER_CHUNK = 1 << 26  # 256 MB in float32
# Resamplings for a standard error without a formula, such as perplexity's: exact to 1 / sqrt(2 * 1000) = 2%.
BOOTSTRAP = 1000
SEED = 1234  # lm_eval's own, for few-shot examples
Figures = dict[str, dict[str, float | None]]  # by task and metric
os.environ["DISABLE_MULTIPROC"] = "1"  # resample in this process: forks of a process with torch's threads may hang


# ---- the backend ---------------------------------------------------------------------------------------------


class Backend(TemplateLM):
    """A GPT as lm_eval asks it: how likely a continuation of a text is, and what comes next.

    replacing: the context in which the model computes (InferenceEngine.replacing). batch_size: rows at a time.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        replacing: Callable[[], AbstractContextManager[None]] = nullcontext,
        batch_size: int = 16,
    ) -> None:
        super().__init__()
        self.model = model
        self.block_size = model.config.block_size
        self.weights_device = next(model.parameters()).device
        self.tokenizer = tokenizer
        self.replacing = replacing
        self.batch_size = batch_size
        self.n_truncated = 0  # requests that lost the beginning of their context

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context becomes: end_of_text, as for GPT-2. Characters have none: a line begins, or token 0."""
        if self.tokenizer.end_of_text is not None:
            return self.tokenizer.end_of_text
        try:
            return int(self.tokenizer.encode("\n")[0])
        except ValueError:
            return 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, in which "<|endoftext|>" is that token. Raises ValueError for unknown characters."""
        end = self.tokenizer.end_of_text
        if end is None:
            return self.tokenizer.encode(string).tolist()
        ids: list[int] = []
        for piece in string.split(END_OF_TEXT):
            ids += [*self.tokenizer.encode(piece).tolist(), end]
        return ids[:-1]

    # ---- how likely --------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, in windows of the context's length, each text by itself."""
        windows = []
        owners = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.block_size, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[i] += log_likelihood
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): its log-likelihood, and whether greedy decoding writes it.

        Requests that differ in their last token only, such as answers A to D, share a row.
        """
        limit = self.block_size
        requests_of: dict[tuple[int, ...], list[int]] = {}  # by the tokens of a row
        for i, (texts, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= limit:
                raise ValueError(
                    f"a task asks for a continuation of {len(continuation)} tokens after {len(context)}; with "
                    f"block_size={limit} it must have 1 to {limit}, after at least one: {str(texts)[-200:]}"
                )
            tokens = context + continuation
            self.n_truncated += len(tokens) > limit + 1
            requests_of.setdefault(tuple(tokens[-(limit + 1) : -1]), []).append(i)

        answers = [(0.0, False)] * len(requests)
        rows = sorted(requests_of, key=len, reverse=True)  # the longest first: what does not fit fails at once
        for start in tqdm(range(0, len(rows), self.batch_size), "log-likelihoods", leave=False, disable=None):
            batch = rows[start : start + self.batch_size]
            # Padding on the right comes after every token that counts: causal attention does not see it.
            padded = [row + (0,) * (len(batch[0]) - len(row)) for row in batch]
            asked = [(b, i) for b, row in enumerate(batch) for i in requests_of[row]]
            continuations = [requests[i][2] for _, i in asked]
            targets = torch.tensor([token for continuation in continuations for token in continuation])
            with self.replacing():
                h = self.model.transformer(torch.tensor(padded, device=self.weights_device))  # (B, T, C)
                before = []  # for each request, the places before each token of its continuation
                for (b, _), continuation in zip(asked, continuations, strict=True):
                    before.append(h[b, len(batch[b]) - len(continuation) : len(batch[b])])
                log_p, greedy = self.scores(torch.cat(before), targets)
            counts = [len(continuation) for continuation in continuations]
            for (_, i), p, g in zip(asked, log_p.split(counts), greedy.split(counts), strict=True):
                answers[i] = (p.sum().item(), bool(g.all()))
        return answers

    def scores(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities of the targets (N,), whether each is the likeliest token (N,)), on the CPU.

        h: (N, C), the last hidden states before the targets (N,).
        """
        log_ps = []
        greedy = []
        at_once = max(1, LOGITS_PER_CHUNK // self.model.config.vocab_size)
        for part, expected in zip(h.split(at_once), targets.to(h.device).split(at_once), strict=True):
            log_p = F.log_softmax(self.model.logits(part).float(), -1)  # (at_once, V)
            log_ps.append(log_p.gather(1, expected[:, None])[:, 0])
            greedy.append(log_p.argmax(1) == expected)
        return torch.cat(log_ps).cpu(), torch.cat(greedy).cpu()

    # ---- what comes next ---------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop text, one at a time; the likeliest tokens unless the task wants them drawn."""
        wanted = [self.read_options(request.args[1], request.task_name) for request in requests]
        texts = []
        for i, (n, stops, options) in enumerate(tqdm(wanted, "texts", leave=False, disable=None)):
            ids = self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
            self.n_truncated += len(ids) > self.block_size - n
            texts.append(self.continuation(ids[-(self.block_size - n) :], n, stops, seed=SEED + i, **options))
        return texts

    def read_options(self, options: dict[str, Any], task: str) -> tuple[int, list[str], dict[str, Any]]:
        """(the most new tokens, stop texts, options of GPT.generate) from a task's generation_kwargs.

        Raises ValueError where they cannot be followed.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("num_beams") == 1:
            del given["num_beams"]
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        n = wanted.pop("max_gen_toks")
        stops = wanted.pop("until")
        is_drawn = wanted.pop("do_sample")
        temperature = float(wanted.pop("temperature", 0.0))
        known = {
            "temperature": temperature if is_drawn else 0.0,
            "top_k": wanted.pop("top_k", None) or None,
            "top_p": wanted.pop("top_p", None) or 1.0,
        }
        if wanted:
            raise ValueError(f"task {task}: its generation_kwargs {wanted} are not supported here")
        if n >= self.block_size:
            raise ValueError(
                f"task {task}: it generates up to {n} tokens; block_size={self.block_size} leaves none for the prompt"
            )
        return n, stops, known

    def continuation(self, prompt: list[int], n: int, stops: Sequence[str] = (), **options: Any) -> str:
        """The text that follows a prompt, up to a stop text, a text's end or n tokens. options: of GPT.generate."""
        end = self.tokenizer.end_of_text
        stops = stops if end is None else [*stops, END_OF_TEXT]
        sample = Sample(self.tokenizer, "", *stops, last_token=end)
        prompts = torch.tensor([prompt], device=self.weights_device)
        with self.replacing():
            for token in self.model.generate(prompts, n, vocab_size=self.tokenizer.vocab_size, **options):
                sample.add(int(token))
                if sample.done:
                    break
        sample.finish()
        return sample.text


# ---- tasks ---------------------------------------------------------------------------------------------------


def load_tasks(names: str, num_fewshot: int | None = None) -> dict[str, Any]:
    """Tasks and groups of lm_eval with their data, as its `evaluate` takes them.

    names: of tasks, groups and tags of lm_eval, with wildcards, or paths of YAML files, separated by commas.
    num_fewshot: examples before each question, None = the task's own number. Raises ValueError, naming the task, where
    one cannot be had.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ValueError("no task is named; try --tasks=lambada_openai,hellaswag")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a line for each time that it tries again
    # lm_eval's own thousands of tasks take half a minute to list.
    manager = TaskManager(include_defaults=not all(map(is_file, wanted)))
    found = find_tasks(manager, wanted)
    try:
        loaded = dict(manager.load(found))
    except ModuleNotFoundError:
        raise
    except Exception as e:  # from datasets, the hub, the network or YAML
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(
            f"tasks={names}: a task cannot be loaded ({reason[:200]}); the data of lm_eval's own tasks are downloaded "
            "once, from the Hugging Face hub: connect, or name a YAML file with local data"
        ) from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise ValueError(f"task {name}: it runs code of the model, or shows it pictures; not supported here")
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:  # 0 in a task's file is meant
            task.set_config("num_fewshot", num_fewshot)
        elif own is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(SEED)
    return loaded


def evaluate_tasks(backend: Backend, loaded: dict[str, Any], limit: int = 0, log_samples: bool = False) -> Any:
    """lm_eval's results: by task its metrics ("results"), "versions", "n-shot", "n-samples".

    limit: items of each task, 0 = all. Raises ValueError where the model cannot answer a task.
    """
    return evaluate(backend, loaded, limit=limit or None, bootstrap_iters=BOOTSTRAP, log_samples=log_samples)


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def find_tasks(manager: TaskManager, wanted: list[str]) -> list[str]:
    """Names that the manager knows, and paths. Raises ValueError with the nearest names for another one."""
    names: list[str] = []
    for name in wanted:
        matching = [name] if is_file(name) else manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, manager.all_tasks, n=5)
            hint = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            raise ValueError(f"task {name}: lm_eval has no such task; {hint}")
        names += matching
    return list(dict.fromkeys(names))


def figures(results: dict[str, Any]) -> Figures:
    """By task and group: each metric and its standard error, as `acc` and `acc_stderr`; None if it is not known.

    If a task has several filters, a metric's name ends with its filter: `exact_match,strict-match`.
    """
    out: Figures = {}
    for task, values in results["results"].items():
        out[task] = {}
        for key, value in values.items():
            metric, _, of_filter = key.partition(",")
            if not of_filter:  # the name, an alias, the number of items
                continue
            name = metric.removesuffix("_stderr")
            name = name if of_filter == "none" else f"{name},{of_filter}"
            name += "_stderr" if metric.endswith("_stderr") else ""
            is_number = isinstance(value, int | float | np.number) and math.isfinite(value)
            out[task][name] = float(value) if is_number else None
    return out
