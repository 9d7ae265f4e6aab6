"""What a recorder notes of a step, counted by hand."""

import contextlib
import gc

import torch
from torch import Tensor, nn

from tests.capture.steps import record
from torchecho.capture.recording import Recording
from torchecho.capture.storage import storage_key
from torchecho.capture.tape import Recorder
from torchecho.capture.unseen import grown_bytes

ATEN = torch.ops.aten
ROW_BYTES, WEIGHT_BYTES, NUMBER_BYTES = 4 * 16 * 4, 16 * 16 * 4, 4


def _given() -> tuple[Tensor, nn.Parameter]:
    return torch.ones(4, 16), nn.Parameter(torch.eye(16))


def _chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sum()


def _named(recording: Recording) -> list[str]:
    return [call.func.overloadpacket.__name__ for call in recording.calls]


def _size_bytes(recording: Recording) -> list[int]:
    return [record.size_bytes for record in recording.storages]


def test_calls_of_forward_and_backward_in_order() -> None:
    recording = record(_chain, *_given())
    calls = [name for name in _named(recording) if name not in ("detach", "t", "expand", "view")]
    assert calls == ["mm", "tanh", "sum", "ones_like", "tanh_backward", "mm"]
    start = recording.backward_starts
    assert [call.in_backward for call in recording.calls] == [False] * start + [True] * (len(recording.calls) - start)
    assert _named(recording)[:start][-1] == "sum"


def test_storages_are_counted_once_with_their_bytes() -> None:
    recording = record(_chain, *_given())
    # x, w; x @ w, tanh, sum; ones, the gradients of tanh and of the weight. Views have none of their own.
    assert _size_bytes(recording) == [
        ROW_BYTES,
        WEIGHT_BYTES,
        ROW_BYTES,
        ROW_BYTES,
        NUMBER_BYTES,
        NUMBER_BYTES,
        ROW_BYTES,
        WEIGHT_BYTES,
    ]
    assert [s.is_parameter for s in recording.storages] == [False, True] + [False] * 6
    assert [s.is_given for s in recording.storages] == [True, True] + [False] * 6


def test_when_storages_are_let_go_and_freed() -> None:
    recording = record(_chain, *_given())
    names = _named(recording)
    product, tanh = recording.storages[2], recording.storages[3]
    after_tanh, after_sum = names.index("tanh") + 1, names.index("sum") + 1
    assert (product.let_go, product.freed) == ([after_tanh], after_tanh)
    # Autograd keeps what tanh made until its backward has run.
    assert tanh.let_go[0] == after_sum
    assert tanh.freed == names.index("tanh_backward") + 1
    assert recording.storages[7].freed is None  # the gradient stays


def test_what_the_program_holds_stays_when_a_copy_of_it_dies() -> None:
    x, w = _given()
    recorder = Recorder(lambda tensor: tensor.detach(), torch.clone)
    recorder.know_sources((x, w))
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            held = torch.tanh(x @ w)
            loss = held.sum()
        recorder.start_backward()
        loss.backward()
    assert recorder.finish().storages[3].freed is None
    assert held.shape == x.shape


def test_what_the_backward_asks_for() -> None:
    recording = record(_chain, *_given())
    names = _named(recording)
    asked = [(unpacking.position, unpacking.storage) for unpacking in recording.unpackings]
    positions = {storage: position for position, storage in asked}
    assert [storage for _, storage in asked] == [3, 0]  # what tanh made, then x for the gradient of w
    assert positions[3] <= names.index("tanh_backward") < positions[0]
    nodes = [unpacking.node for unpacking in recording.unpackings]
    assert nodes == sorted(nodes, reverse=True)


def test_graph_that_is_kept_is_asked_twice() -> None:
    recording = record(_chain, *_given(), num_backwards=2)
    assert [unpacking.storage for unpacking in recording.unpackings] == [3, 0, 3, 0]


def test_writes_in_place() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        y[0].add_(1)
        return (y @ w).sum()

    recording = record(program, *_given())
    writers = [call for call in recording.calls if call.writes]
    assert [call.func for call in writers] == [ATEN.add_.Tensor]
    assert writers[0].writes == (2,)  # the storage behind the view


def test_what_is_not_differentiated_is_unsaved_in_the_forward() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        loss = (x @ w).sum()
        unused = torch.tanh(x @ w).exp()
        del unused
        return loss

    recording = record(program, *_given())
    names = _named(recording)
    tanh = next(call for call in recording.calls if call.func == ATEN.tanh.default).allocates[0]
    assert names.index("exp") < recording.storages[tanh].unsaved[0] <= recording.backward_starts
    assert all(unpacking.storage != tanh for unpacking in recording.unpackings)


def test_what_is_saved_for_another_backward_stays() -> None:
    x, w = _given()
    kept: list[Tensor] = []

    def program(x: Tensor, w: Tensor) -> Tensor:
        kept.append(torch.tanh(x @ w).sum())
        return (x @ w).sum()

    recording = record(program, x, w)
    tanh = next(call for call in recording.calls if call.func == ATEN.tanh.default).allocates[0]
    assert recording.storages[tanh].freed is None
    kept[0].backward()


def test_recorder_holds_no_tensor() -> None:
    import weakref

    recordings: list[Recording] = []
    x, w = _given()
    made: list[weakref.ref[Tensor]] = []

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        made.append(weakref.ref(y))
        return y.sum()

    recordings.append(record(program, x, w))
    assert made[0]() is None


def test_storages_without_identity() -> None:
    assert storage_key(torch.ones(2).to_sparse()) is None
    x = torch.ones(4, 4)
    assert storage_key(x) == storage_key(x[1:]) == storage_key(x.t())
    assert storage_key(x) != storage_key(x.clone())


def test_bytes_that_a_step_has_made_so_far() -> None:
    given = torch.randn(4, 16)
    recorder = Recorder(lambda t: t, lambda t: t)
    recorder.know_sources([given])
    with recorder:
        made = torch.tanh(given) * 2  # 256 bytes stay, 256 are gone
        made.add_(torch.tensor([1.0, 2.0, 3.0, 4.0] * 4))
        listed = torch.tensor([1.0, 2.0])
        found = recorder.recording
        assert grown_bytes(found.log) == made.nbytes + listed.nbytes
        del given
        assert grown_bytes(found.log) == listed.nbytes


def test_whole_nodes_are_calls_of_the_backward() -> None:
    recorder = Recorder(lambda t: t, lambda t: t)
    x = torch.ones(4)
    recorder.start_backward()
    recorder.node_ran("ProdBackward0", [x], [x * 2, None], 100)
    (call,) = recorder.finish().calls
    assert (str(call.func), call.in_backward, call.writes) == ("ProdBackward0", True, ())
    sizes = [recorder.recording.storages[number].size_bytes for number in (*call.reads, *call.allocates)]
    assert sizes == [16, 16, 100]


def test_tensor_that_changes_its_shape_is_seen_as_it_is_then() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        z = y.detach().unsqueeze_(0)
        z.squeeze_(0).unsqueeze_(1)
        return (y + z.exp().squeeze(1)).sum()

    exp = next(call for call in record(program, *_given()).calls if call.func == ATEN.exp.default)
    assert exp.args[0].shape == (4, 1, 16)


def test_call_that_fails_leaves_nothing() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            torch.add(x, torch.ones(3), alpha=2)
        return torch.add(x @ w, x, alpha=3).sum()

    recording = record(program, *_given())
    assert [dict(call.kwargs) for call in recording.calls if call.func == ATEN.add.Tensor] == [{"alpha": 3}]
    assert len(recording.forward_places) == recording.backward_starts


def test_calls_of_a_kind() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        rows = [x[i].mul(2) for i in (0, 1)]  # as far as the call goes they are alike: where a row begins costs nothing
        return (rows[0] + x[0].mul(2.0) + rows[1] @ w).sum()

    first, second, of_float = [call for call in record(program, *_given()).calls if call.func == ATEN.mul.Tensor]
    assert first.args[0] != second.args[0]
    assert first.kind == second.kind != of_float.kind


def test_garbage_collector_need_not_walk_over_what_is_written_down() -> None:
    log = record(_chain, *_given()).log
    for _ in range(2):  # the first lets go of tuples of atoms, the second of tuples of those
        gc.collect()
    columns = (log.args, log.sights, log.made, log.unpackings, log.let_go, log.unsaved)
    assert not [row for column in columns for row in column if gc.is_tracked(row)]
