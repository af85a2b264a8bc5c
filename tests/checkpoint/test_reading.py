"""The reading engine: every byte where it belongs, for every kind of shard, mapped or read, verified or not."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

from holdfast.checkpoint import block_reader, reading
from holdfast.checkpoint.reading import Loading
from holdfast.core.errors import Damaged
from holdfast.core.ranks import SingleProcess
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan import staging
from holdfast.plan.files import ArrayDestination, FlatArray, Place, RawArray, ShardPiece, TensorRun, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile, Want, plan_load
from holdfast.plan.staging import HostStaging
from holdfast.storage.local_files import LocalReader
from holdfast.storage.open_files import OpenReaders

PAGE = 4096


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Buffers of a page, and a thread for every page: what megabytes do in use happens here to kilobytes."""
    monkeypatch.setattr(staging, "SMALLEST_BUFFER_BYTES", PAGE)
    monkeypatch.setattr(reading, "_THREAD_BYTES", PAGE)
    monkeypatch.setattr(block_reader, "_UNCACHED_BYTES", 1)


class Source:
    """A folder with one file."""

    def __init__(self, folder, data: bytes, *, mappable: bool) -> None:
        self.path = str(folder)
        self._file = folder / "file"
        self._file.write_bytes(data)
        self._mappable = mappable
        self.opened: list[LocalReader] = []

    def open_file(self, name: str) -> LocalReader:
        self.opened.append(LocalReader(self._file, mappable=self._mappable))
        return self.opened[-1]


class Elements:
    """A destination that takes elements only, as one that converts them."""

    def __init__(self, array: RawArray) -> None:
        self._array = array

    def flat(self) -> None:
        return None

    def direct(self) -> None:
        return None

    def put(self, part: Box, data: RawArray) -> None:
        self._array[part.within(Box.full(self._array.shape))] = data


class OnDevice(FlatArray):
    """A destination without host memory: every row comes from a buffer."""

    def __init__(self, array: RawArray) -> None:
        super().__init__(array)
        self._target, self.memory = FlatArray(array), None  # type: ignore[assignment]

    def write(self, at: int, pitch: int, rows: RawArray) -> None:
        self._target.write(at, pitch, np.array(rows))


class DeviceDestination(ArrayDestination):
    def flat(self) -> OnDevice:
        return OnDevice(self._array)

    def direct(self) -> None:
        return None


def _strided(array: RawArray) -> ArrayDestination:
    """Return a destination in memory that is not contiguous."""
    return ArrayDestination(array)


KINDS = {"memory": ArrayDestination, "elements": Elements, "device": DeviceDestination, "strided": _strided}


class Case:
    """Random tensors in a file of random blocks, and random boxes of them to load."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.places, position = [], draw.choice([0, 8, 120, 4096])
        for number in range(draw.randint(1, 5)):
            dims = draw.randint(0, 3)
            most = {0: 1, 1: 9000, 2: 120, 3: 24}[dims]
            shape = tuple(draw.randint(1, most) for _ in range(dims))
            spec = TensorSpec(f"w{number}", dtype_named(draw.choice(["float32", "bfloat16", "uint8"])), shape)
            position = -(-position // spec.dtype.bytes) * spec.dtype.bytes  # as every plan has it
            self.places.append(Place(spec, "file", position))
            position += spec.bytes + draw.choice([0, 0, 3, 700])
        self.data = np.random.default_rng(seed).integers(0, 255, position + 5).astype(np.uint8).tobytes()
        size = draw.choice([1, 2, 5, 64]) * 4096
        blocks = [(at, self.data[at : at + size]) for at in range(0, len(self.data), size)]
        self.file = StoredFile(
            "file",
            tuple(StoredBlock(at, len(data), digest_hex(data)) for at, data in blocks),
            tuple(self.places),
        )
        self.arrays: list[tuple[Place, Box, RawArray]] = []
        self.destinations: dict = {}
        for place in self.places:
            for _ in range(draw.choice([1, 1, 2, 3])):
                self._add(place)

    def _add(self, place: Place) -> None:
        draw, shape = self.draw, place.spec.shape
        begins = [draw.choice([0, draw.randint(0, size - 1)]) for size in shape]
        stops = [draw.choice([size, draw.randint(b + 1, size)]) for b, size in zip(begins, shape, strict=True)]
        box = Box(tuple(begins), tuple(stop - begin for begin, stop in zip(begins, stops, strict=True)))
        kind = draw.choice(sorted(KINDS))
        wide = (*box.sizes[:-1], 2 * box.sizes[-1]) if box.sizes and kind == "strided" else box.sizes
        array = np.zeros(wide, f"u{place.spec.dtype.bytes}")
        if wide != box.sizes:
            array = array[..., ::2]
        self.arrays.append((place, box, array))
        self.destinations.setdefault((place, box), []).append(KINDS[kind](array))

    def plan(self, *, verify: bool, portion_bytes: int):
        wants = [Want(place, box, 0) for place, box in self.destinations]
        return plan_load([self.file], wants, verify=verify, portion_bytes=portion_bytes)

    def assert_loaded(self) -> None:
        for place, box, array in self.arrays:
            stored = np.frombuffer(self.data, np.uint8)[place.begin : place.end]
            whole = stored.view(f"u{place.spec.dtype.bytes}").reshape(place.spec.shape)
            assert (array == whole[box.within(Box.full(place.spec.shape))]).all(), (place, box)


@pytest.mark.sliced(5)
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("seed", range(100))
def test_every_byte_is_where_it_belongs(tmp_path, seed, verify, mapped):
    case = Case(seed)
    source = Source(tmp_path, case.data, mappable=mapped)
    reads = case.plan(verify=verify, portion_bytes=16 * PAGE if mapped else PAGE)
    counted: list[int] = []
    loading = Loading(SingleProcess(), source, case.destinations, counted.append, lambda: HostStaging(3))
    loaded = loading.run_local(reads) if mapped else loading.run_read(reads, [0], 5.0)
    assert loaded.failure is None
    case.assert_loaded()
    assert loaded.read_bytes == sum(counted) == sum(read.bytes for read in reads)
    assert loaded.touched == {"file"}


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_what_is_not_in_the_page_cache_is_read_all_the_same(tmp_path, mapped):
    for seed in range(20):
        case = Case(seed)
        source = Source(tmp_path, case.data, mappable=mapped)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        reads = case.plan(verify=True, portion_bytes=16 * PAGE if mapped else PAGE)
        loading = Loading(SingleProcess(), source, case.destinations, lambda size: None, lambda: HostStaging(2))
        loaded = loading.run_local(reads) if mapped else loading.run_read(reads, [0], 5.0)
        assert loaded.failure is None
        case.assert_loaded()


def _flip(source_file, at: int) -> None:
    with source_file.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_of_several_damaged_blocks_the_first_is_named_however_threads_run(tmp_path, mapped):
    spec = TensorSpec("w", dtype_named("uint8"), (40 * PAGE,))
    data = bytes(40 * PAGE)
    blocks = tuple(StoredBlock(at, PAGE, digest_hex(data[at : at + PAGE])) for at in range(0, len(data), PAGE))
    place = Place(spec, "file", 0)
    for _ in range(10):
        source = Source(tmp_path, data, mappable=mapped)
        for at in (7 * PAGE, 9 * PAGE, 31 * PAGE):
            _flip(tmp_path / "file", at + 5)
        box = Box.full(spec.shape)
        array = np.zeros(spec.shape, np.uint8)
        reads = plan_load(
            [StoredFile("file", blocks, (place,))], [Want(place, box, 0)], verify=True, portion_bytes=PAGE
        )
        destinations = {(place, box): [ArrayDestination(array)]}
        loading = Loading(SingleProcess(), source, destinations, lambda size: None, lambda: HostStaging(4))
        loaded = loading.run_local(reads) if mapped else loading.run_read(reads, [0], 5.0)
        assert isinstance(loaded.failure, Damaged)
        assert f"the block at {7 * PAGE} " in str(loaded.failure)


class FetchesAhead:
    """A reader as those of object stores and captured states: it remembers where it was."""

    mappable = False

    def __init__(self, reader: LocalReader, users: set[int]) -> None:
        self._reader, self._users, self.size = reader, users, reader.size
        self.map, self.close = reader.map, reader.close

    def read_into(self, offset: int, buffers) -> None:
        self._users.add(threading.get_ident())
        self._reader.read_into(offset, buffers)


def test_one_thread_uses_a_reader_that_remembers_where_it_was(tmp_path):
    users: set[int] = set()

    class Remote(Source):
        def open_file(self, name: str):
            return FetchesAhead(super().open_file(name), users)

    case = Case(11)
    source = Remote(tmp_path, case.data, mappable=False)
    reads = case.plan(verify=True, portion_bytes=PAGE)
    assert len(reads) > 4
    loaded = Loading(SingleProcess(), source, case.destinations, lambda size: None, lambda: HostStaging(4)).run_read(
        reads, [0], 5.0
    )
    assert loaded.failure is None
    case.assert_loaded()
    assert users == {threading.get_ident()}


def test_all_files_are_closed_and_no_thread_is_left(tmp_path):
    case = Case(3)
    source = Source(tmp_path, case.data, mappable=True)
    Loading(SingleProcess(), source, case.destinations, lambda size: None, lambda: HostStaging(4)).run_local(
        case.plan(verify=True, portion_bytes=PAGE)
    )
    for reader in source.opened:
        with pytest.raises(OSError):
            os.fstat(reader._descriptor)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_an_interrupt_stops_the_threads(tmp_path):
    case = Case(5)
    source = Source(tmp_path, case.data, mappable=True)

    class Stop(BaseException):
        pass

    def stop(size: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        Loading(SingleProcess(), source, case.destinations, stop, lambda: HostStaging(4)).run_local(
            case.plan(verify=True, portion_bytes=PAGE)
        )
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_buffers_that_cannot_be_made_are_a_failure_of_this_rank_and_no_exception(tmp_path):
    """Other ranks wait for this one: it must come to the end of the load."""

    class NoMemory(HostStaging):
        def lend(self):
            raise RuntimeError("no page-locked memory")

    case = Case(5)
    for mapped in (True, False):
        source = Source(tmp_path, case.data, mappable=mapped)
        loading = Loading(SingleProcess(), source, case.destinations, lambda size: None, lambda: NoMemory(2))
        reads = case.plan(verify=True, portion_bytes=PAGE)
        loaded = loading.run_local(reads) if mapped else loading.run_read(reads, [0], 5.0)
        assert "no page-locked memory" in str(loaded.failure)

    def fail() -> HostStaging:
        raise RuntimeError("no device")

    for mapped in (True, False):
        loading = Loading(SingleProcess(), source, case.destinations, lambda size: None, fail)
        loaded = loading.run_local(reads) if mapped else loading.run_read(reads, [0], 5.0)
        assert "no device" in str(loaded.failure) and not loaded.read_bytes


def test_a_file_that_is_cut_while_it_is_read_raises_and_kills_nobody(tmp_path):
    """A map of it would end the process with a signal."""
    file = tmp_path / "file"
    file.write_bytes(bytes(20 * PAGE))
    reader = LocalReader(file, mappable=True)
    with HostStaging(1).lend() as buffers:
        blocks = block_reader.BlockReader(
            0, str(tmp_path), OpenReaders(lambda name: reader), block_reader.FlatDestinations({}), buffers, PAGE
        )
        assert [part.nbytes for part in blocks.parts(reader, 0, 20 * PAGE)] == [PAGE] * 20
        os.truncate(file, 3 * PAGE)
        with pytest.raises(Damaged, match="too early"):
            list(blocks.parts(reader, 0, 20 * PAGE))
    reader.close()


def test_pieces_that_take_elements_come_a_few_rows_at_a_time(monkeypatch):
    """A destination may copy what it gets: many threads with large pieces would exceed the bound."""
    monkeypatch.setattr(block_reader, "_PUT_BYTES", 100)
    sizes: list[int] = []

    class Watched(Elements):
        def put(self, part: Box, data: RawArray) -> None:
            sizes.append(data.nbytes)
            super().put(part, data)

    for shape, most in (((7, 10), 80), ((300,), 100), ((2, 90), 360), ((), 4), ((0, 3), 0)):
        array = np.zeros(shape, np.uint32)
        spec = TensorSpec("w", dtype_named("float32"), shape)
        place, box = Place(spec, "file", 0), Box.full(shape)
        data = np.arange(1, 1 + array.size, dtype=np.uint32).reshape(shape)
        destinations = block_reader.FlatDestinations({(place, box): [Watched(array)]})
        sizes.clear()
        destinations.put(ShardPiece(TensorRun(place, box, 0), box, 0, box), data)
        assert (array == data).all() and max(sizes, default=0) <= most
