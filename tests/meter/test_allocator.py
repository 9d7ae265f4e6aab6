import os
import subprocess
import sys
import threading

import pytest
import torch

from torchecho.meter import allocator

KIB = 1024


@pytest.fixture(autouse=True)
def installed():
    allocator.install()


def floats(num_bytes):
    return torch.empty(num_bytes // 4)


def test_live_bytes_are_the_bytes_asked_for():
    before = allocator.live_bytes()
    odd = torch.empty(1001, dtype=torch.uint8)
    assert allocator.live_bytes() - before == 1001
    view = odd[::2]
    del odd
    assert allocator.live_bytes() - before == 1001
    del view
    assert allocator.live_bytes() == before


def test_peak_of_a_chain_of_adds():
    x = floats(4 * KIB)
    before = allocator.live_bytes()
    allocator.reset_peak()
    y = torch.add(torch.add(torch.add(x, x), x), x)
    # Two links of the chain are alive at once: what is read and what is made.
    assert allocator.peak_bytes() - before == 8 * KIB
    assert allocator.live_bytes() - before == y.nbytes == 4 * KIB
    allocator.reset_peak()
    assert allocator.peak_bytes() - before == 4 * KIB


def test_events_are_signed_and_in_order():
    a = floats(4 * KIB)
    allocator.record_events(True)
    b = torch.add(a, a)
    del a
    c = torch.cat([b, b])
    del b, c
    allocator.record_events(False)
    torch.empty(7)
    assert allocator.events() == [4 * KIB, -4 * KIB, 8 * KIB, -4 * KIB, -8 * KIB]
    allocator.record_events(True)
    allocator.record_events(False)
    assert allocator.events() == []


def test_resize_and_empty_tensors_are_counted():
    before = allocator.live_bytes()
    x = torch.empty(0)
    assert allocator.live_bytes() == before
    x.resize_(100)
    assert allocator.live_bytes() - before == 400
    x.untyped_storage().resize_(0)
    assert allocator.live_bytes() == before


def test_storage_from_elsewhere_is_not_counted():
    here = torch.empty(10)
    elsewhere = torch.frombuffer(bytearray(40), dtype=torch.float32)
    assert allocator.counted_bytes(here.data_ptr()) == 40
    assert allocator.counted_bytes(elsewhere.data_ptr()) is None


def test_counts_are_exact_with_many_threads():
    before = allocator.live_bytes()
    kept = [[] for _ in range(4)]

    def work(mine):
        for n in range(2000):
            tensor = torch.empty(n % 97, dtype=torch.uint8)
            if n % 10 == 0:
                mine.append(tensor)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allocator.live_bytes() - before == 4 * sum(n % 97 for n in range(0, 2000, 10))
    kept.clear()
    assert allocator.live_bytes() == before


def test_memory_is_aligned_and_copy_on_write_storages_still_work():
    x = torch.arange(1000.0)
    assert x.data_ptr() % 64 == 0
    lazy = torch._lazy_clone(x)
    lazy.add_(1)
    assert torch.equal(lazy, torch.arange(1000.0) + 1)
    assert torch.equal(x, torch.arange(1000.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_tensors_work_in_a_forked_child():
    code = (
        "import os, torch; from torchecho.meter import allocator as a; a.install(); x = torch.empty(10);"
        "pid = os.fork(); before = a.live_bytes(); y = torch.empty(5);"
        "grown = a.live_bytes() - before; pid or os._exit(grown);"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), grown)"
    )
    assert run_python(code).stdout.split() == ["20", "20"]


def test_two_processes_may_build_at_once(tmp_path):
    code = (
        "import torch; from torchecho.meter import allocator as a; a.install();"
        "before = a.live_bytes(); x = torch.empty(25); print(a.live_bytes() - before)"
    )
    environment = {**os.environ, "TORCHECHO_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["100", "100"]
    assert len(list(tmp_path.iterdir())) == 1


def test_damaged_library_and_missing_compiler_are_no_crash(tmp_path):
    code = "from torchecho.meter import allocator as a; print(a.available())"
    built = run_python(code, TORCHECHO_CACHE=str(tmp_path))
    (library,) = tmp_path.iterdir()
    library.write_bytes(b"not a library")
    damaged = run_python(code, TORCHECHO_CACHE=str(tmp_path))
    missing = run_python(code, TORCHECHO_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert [run.stdout.strip() for run in (built, damaged, missing)] == ["True", "True", "False"]


def test_missing_compiler_is_named():
    code = (
        "from torchecho.errors import MeasureError\n"
        "from torchecho.meter import allocator as a\n"
        "try: a.install()\n"
        "except MeasureError as error: print(error)"
    )
    assert "CXX=no-such-compiler" in run_python(code, CXX="no-such-compiler").stdout


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
