"""Where the weights of a folder are looked for, and files that are damaged."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import change_header
from tests.tiny_models import save_tiny_model
from workers.errors import ModelError
from workers.loading.checkpoint import MAX_HEADER_BYTES, read_checkpoint

pytestmark = pytest.mark.cpu

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model(tmp_path / "llama", "llama")


@pytest.fixture
def parted(tmp_path):
    return save_tiny_model(tmp_path / "llama", "llama", shard_size="200KB")


def refusal(folder) -> str:
    with pytest.raises(ModelError) as refused:
        read_checkpoint(folder)
    return str(refused.value)


def test_the_only_file_may_have_any_name(folder):
    stored = read_checkpoint(folder)
    (folder / SINGLE).rename(folder / "weights.safetensors")

    found = read_checkpoint(folder)

    assert found.keys() == stored.keys()
    assert {tensor.file for tensor in found.values()} == {folder / "weights.safetensors"}


def test_several_files_without_an_index(folder):
    (folder / SINGLE).rename(folder / "b.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "a.safetensors")

    assert refusal(folder) == (
        f"{folder} has neither {SINGLE} nor {INDEX}, and several files: a.safetensors, "
        "b.safetensors: add the index, or keep one"
    )


@pytest.mark.parametrize("kind", ["single", "parted", "renamed"])
def test_a_second_copy_of_mistrals_own(folder, parted, kind):
    """Under other names, which the model doesn't know."""
    where = parted if kind == "parted" else folder
    if kind == "renamed":
        (folder / SINGLE).rename(folder / "mistral.safetensors")
    expected = read_checkpoint(where)
    for number in (1, 2):
        name = f"consolidated-0000{number}-of-00002.safetensors"
        save_file({f"layers.{number}.attention.wq.weight": torch.zeros(2)}, where / name)
    (where / "consolidated.safetensors.index.json").write_text('{"weight_map": {}}')

    assert read_checkpoint(where) == expected


def test_a_copy_of_mistrals_own_alone(folder):
    """Of some models transformers knows these names."""
    (folder / SINGLE).rename(folder / "consolidated.safetensors")

    files = {tensor.file.name for tensor in read_checkpoint(folder).values()}

    assert files == {"consolidated.safetensors"}


def test_no_weights(folder):
    (folder / SINGLE).unlink()

    assert refusal(folder) == f"{folder} has neither {SINGLE} nor {INDEX}"


def test_a_pickle_is_refused_with_a_command_that_converts_it(folder):
    weights = load_file(folder / SINGLE)
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()

    message = refusal(folder)

    assert "pytorch_model.bin is a pickle, which may run code when it is read" in message
    python, option, code = shlex.split(message[message.index("python -c") :])
    assert (python, option) == ("python", "-c")
    exec(code, {})
    assert read_checkpoint(folder).keys() == weights.keys()


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model.pt"])
def test_a_pickle_that_transformers_would_not_find(folder, name):
    (folder / SINGLE).rename(folder / name)

    assert f"{name} is a pickle" in refusal(folder)
    assert "rename it to pytorch_model.bin and convert it by python -c" in refusal(folder)


def test_a_missing_part(parted):
    part = next(parted.glob("model-00002*"))
    part.unlink()

    assert refusal(parted) == f"{part} is missing: {INDEX} names it"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', "\x00"])
def test_an_index_that_cannot_be_read(parted, content):
    (parted / INDEX).write_text(content)

    assert refusal(parted) == f"{parted / INDEX} can't be read: it must hold a weight_map"


def test_an_index_that_leads_outside(parted):
    path = parted / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    path.write_text(json.dumps(index))

    assert "must be a file of the same folder" in refusal(parted)


def test_an_index_that_names_a_tensor_its_file_lacks(parted):
    path = parted / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["extra"] = index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))

    assert "lacks tensor extra" in refusal(parted)


def test_a_tensor_in_two_files_is_where_the_index_says(parted):
    expected = read_checkpoint(parted)
    for file in {tensor.file for tensor in expected.values()} - {expected[NORM].file}:
        save_file(load_file(file) | {NORM: torch.zeros(3)}, file)

    assert read_checkpoint(parted)[NORM] == expected[NORM]


def test_a_damaged_header(folder):
    path = folder / SINGLE
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"!" + content[9:])

    assert refusal(folder) == f"{path} isn't safetensors: its header can't be read"


def test_a_header_too_long_to_be_one(folder):
    path = folder / SINGLE
    length = MAX_HEADER_BYTES + 1
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)

    assert refusal(folder) == (
        f"{path} isn't safetensors: a header of {length} bytes must be at most {MAX_HEADER_BYTES}"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", None),
        ("dtype", 4),
        ("dtype", "BF17"),
        ("shape", None),
        ("shape", [64.0]),
        ("shape", [-64]),
        ("shape", [True, 64]),
        ("data_offsets", None),
        ("data_offsets", [0]),
        ("data_offsets", [-256, 0]),
    ],
)
def test_a_header_that_describes_no_tensor(folder, field, value):
    change_header(folder / SINGLE, lambda header: header[NORM].update({field: value}))

    assert refusal(folder).startswith(f"{folder / SINGLE}")


@pytest.mark.parametrize(("field", "value"), [("dtype", "BF16"), ("shape", [65]), ("shape", [])])
def test_a_tensor_whose_bytes_do_not_make_its_shape(folder, field, value):
    change_header(folder / SINGLE, lambda header: header[NORM].update({field: value}))

    message = refusal(folder)

    assert message.startswith(f"{folder / SINGLE}: {NORM} has 256 bytes, but shape ")
    assert message.endswith("the file is damaged; fetch it again")


@pytest.mark.parametrize("shift", [-4, 4, 1 << 40])
def test_a_tensor_that_lies_in_another_or_outside(folder, shift):
    def move(header: dict) -> None:
        header[NORM]["data_offsets"] = [place + shift for place in header[NORM]["data_offsets"]]

    change_header(folder / SINGLE, move)

    message = refusal(folder)

    assert str(folder / SINGLE) in message
    assert "where the tensor before it ends: the file is damaged" in message


def test_a_file_that_names_the_tensor_where_it_is_cut(folder):
    path = folder / SINGLE
    content = path.read_bytes()
    path.write_bytes(content[:-4])

    assert refusal(folder).startswith(f"{path} is truncated: of ")
    assert f"up to the end of {NORM} it has" in refusal(folder)


def test_bytes_behind_the_last_tensor(folder):
    with (folder / SINGLE).open("ab") as file:
        file.write(b"\0")

    assert refusal(folder) == (
        f"{folder / SINGLE} has 1 bytes behind its last tensor: it is damaged; fetch it again"
    )


def test_headers_as_safetensors_writes_them(tmp_path):
    """Empty tensors, scalars, formats that models don't have: all is described, all fits."""
    tensors = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
        "packed": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "mask": torch.zeros(5, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})

    found = {name: tensor.shape for name, tensor in read_checkpoint(tmp_path).items()}

    assert found == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
