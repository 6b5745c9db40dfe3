"""A model without weights for vLLM: its shape, and a tokenizer of which every token is a word, so that lengths are exact."""

from pathlib import Path

from cbatch import ModelSpec
from reproduction.bench.peers.measure import write_checkpoint

BATCH, BUDGET, LONGEST = 256, 2048, 4096
VLLM, SAME_RULE = "vllm", f"policy=vllm_v1 chunk={BUDGET}"


def write_model(spec: ModelSpec, folder: Path) -> None:
    """Writes config.json and the tokenizer's files; weights come from `--load-format dummy`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_checkpoint(spec, folder)
    words = {f"t{number}": number for number in range(spec.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
