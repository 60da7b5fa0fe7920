"""One rank's part of a model: built, cut, read from its files, and run on a cache that is given."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from workers.layers.linear_methods import choose_methods
from workers.layers.packed import packing_what_runs
from workers.layers.paged_attention import AttentionPass, PagedAttention, StepPass
from workers.loading.checkpoint import StoredTensor, main_dtype, read_checkpoint
from workers.loading.conversion import Source
from workers.loading.naming import TieError, match_names
from workers.loading.text_part import text_tensors
from workers.loading.weights import fill_with_noise, load_weights
from workers.models import build
from workers.models import config as model_files
from workers.models.invariance import check_rows, make_invariant
from workers.models.lean_layers import use_lean_layers
from workers.models.lean_model import LeanModel, find_lean_model
from workers.models.probe import find_attention_calls
from workers.models.sharding import check_quantisable, shard_model
from workers.parallel import TensorParallel

logger = logging.getLogger(__name__)

# Reading the weights, so that a file is read while others are copied; a host has its cores to do.
GPU_THREADS = 4


class ModelPart:
    """What transformers built, with our layers in it. `calls` are its attention calls, in order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        device: torch.device,
        parallel: TensorParallel,
        on_progress: Callable[[int, int], None],
        random_weights: bool = False,
        deterministic: bool = False,
        quantization: str = "none",
    ) -> None:
        """Builds and loads; `on_progress` hears (bytes read, bytes in all) of this rank's part.

        With `random_weights` nothing but the configuration is read.

        Raises ModelError: the model or its files can't be served so.
        """
        self._device = device
        self._attention = PagedAttention()
        self._lean: LeanModel | None = None
        whole = model_files.read_config(folder)
        text = model_files.text_part(whole)
        stored = {} if random_weights else read_checkpoint(folder)
        self.dtype = model_files.resolve_dtype(dtype, (text, whole), main_dtype(stored))
        self.max_model_len = model_files.max_model_len(text)
        sources: dict[str, Source] = {}
        if random_weights:
            self.module = build.build_model(text, self.dtype, self._attention)
        else:
            sources = self._match(text, stored, folder)
        self.eos_token_ids = model_files.eos_token_ids(folder, whole)
        num_embeddings = self.module.get_parameter(build.head_name(self.module)).shape[0]
        self.vocab_size = model_files.count_token_ids(folder, num_embeddings, self.eos_token_ids)
        methods = choose_methods(
            device, self.dtype, deterministic=deterministic, quantization=quantization
        )
        if quantization != "none":
            check_quantisable(self.module)
        sharding = shard_model(self.module, parallel, methods)
        if deterministic:
            make_invariant(self.module, device)
        if random_weights:
            fill_with_noise(self.module, sharding.shards, device)
        else:
            load_weights(
                self.module,
                sources,
                sharding.shards,
                device=device,
                num_threads=GPU_THREADS if device.type == "cuda" else 1,
                on_progress=on_progress,
            )
        # Of this rank's part, as it lies in a checkpoint.
        self.parameter_bytes = sum(each.nbytes for each in self.module.parameters())
        build.initialize_buffers(self.module, device)
        with torch.inference_mode():
            with packing_what_runs(self.module):
                self.calls = find_attention_calls(
                    self.module,
                    self.forward,
                    heads=sharding.heads,
                    max_positions=self.max_model_len,
                    vocab_size=self.vocab_size,
                    tp=parallel.size,
                )
            if device.type == "cpu":
                use_lean_layers(
                    self.module,
                    self.forward,
                    self._attention,
                    self.calls,
                    heads=sharding.heads,
                    max_positions=self.max_model_len,
                    vocab_size=self.vocab_size,
                    parallel=parallel,
                )
                self._lean = find_lean_model(
                    self.module,
                    self.forward,
                    self._attention,
                    heads=sharding.heads,
                    max_positions=self.max_model_len,
                    vocab_size=self.vocab_size,
                    parallel=parallel,
                )
            if deterministic:
                check_rows(
                    self.module,
                    self.forward,
                    heads=sharding.heads,
                    max_positions=self.max_model_len,
                    vocab_size=self.vocab_size,
                )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: AttentionPass,
    ) -> torch.Tensor:
        """[T], [T], n rows of T -> this rank's logits [n, vocabulary part]. In inference mode."""
        ids = input_ids.to(self._device, torch.int64).unsqueeze(0)
        position_ids = positions.to(self._device, torch.int64).unsqueeze(0)
        rows = wanted.to(self._device, torch.int64)
        with self._attention.running(attention, position_ids):
            if self._lean is not None and isinstance(attention, StepPass):
                return self._lean(ids, position_ids, rows)
            output = self.module(
                input_ids=ids,
                # Without a mask transformers would guess from the positions where sequences begin.
                attention_mask=torch.ones_like(ids, dtype=torch.bool),
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _match(
        self, text: PreTrainedConfig, stored: Mapping[str, StoredTensor], folder: Path
    ) -> dict[str, Source]:
        try:
            return self._build(text, stored, folder)
        except TieError as error:
            logger.warning("they stay two, as transformers has it: %s", error)
            text.tie_word_embeddings = False
            return self._build(text, stored, folder)

    def _build(
        self, config: PreTrainedConfig, stored: Mapping[str, StoredTensor], folder: Path
    ) -> dict[str, Source]:
        """Makes the whole model without weights; returns where each of its tensors comes from."""
        self.module = build.build_model(config, self.dtype, self._attention)
        shapes = {name: tensor.shape for name, tensor in self.module.state_dict().items()}
        return match_names(
            self.module,
            shapes,
            text_tensors(stored, shapes),
            folder,
            ignored=build.left_out(self.module),
        )
