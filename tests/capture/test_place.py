"""Where in a program a call stands."""

import sys
from pathlib import Path

import pytest
import torch

import torchecho
from torchecho.capture.place import Place, _is_library, find_place, source_of


def here(func: object = "op") -> Place:
    """Return the place of the caller."""
    return find_place(func, sys._getframe(1))


def test_calls_of_a_loop_stand_at_one_place() -> None:
    first, second = [here() for _ in range(2)]
    assert first == second


def test_two_calls_on_one_line_are_two_places() -> None:
    pair = (here(), here())
    assert pair[0] != pair[1]
    assert source_of(pair[0]) == source_of(pair[1])


def test_what_is_called_is_part_of_the_place() -> None:
    first, second = [here(name) for name in "ab"]
    assert first != second
    assert first[1:] == second[1:]


def test_source_is_file_and_line() -> None:
    line = sys._getframe().f_lineno + 1
    place = here()
    assert source_of(place) == f"{Path(__file__).name}:{line}"


def test_source_of_what_python_itself_calls_is_not_told() -> None:
    code = compile("", "<frozen runpy>", "exec")
    assert source_of(("op", code, 0)) == ""


@pytest.mark.parametrize(
    ("file", "is_passed_over"),
    [
        (Path(torch.__file__).parent / "nn/functional.py", True),
        (Path(torch.__file__).parents[1] / "torchvision/models/resnet.py", False),
        (Path(torchecho.__file__).parent / "engine/door.py", True),
        (Path(torchecho.__file__).parent / "bench/eager_models.py", False),
    ],
    ids=["torch", "another library", "torchecho", "a model of the benchmarks"],
)
def test_only_what_carries_a_step_out_is_passed_over(file: Path, is_passed_over: bool) -> None:
    assert _is_library(str(file)) == is_passed_over


def test_frames_of_torch_are_passed_over() -> None:
    found: list[Place] = []

    class Inner(torch.nn.Module):
        def forward(self, x: int) -> int:
            found.append(find_place("op", sys._getframe()))
            return x

    torch.nn.Sequential(Inner())(1)
    assert found[0][1].co_name == "forward"

    class Called(torch.nn.Module):
        pass

    Called.forward = lambda self, x: x
    module = Called()
    module.register_forward_hook(lambda *_: found.append(find_place("op", sys._getframe(1))))
    line = sys._getframe().f_lineno + 1
    module(1)
    assert source_of(found[1]) == f"{Path(__file__).name}:{line}"


def test_no_training_code_on_the_stack() -> None:
    assert source_of(find_place("op", None)) == ""
