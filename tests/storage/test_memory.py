from holdfast.storage.memory import MemoryStorage


def test_two_roots_share_nothing():
    one, two = MemoryStorage("one"), MemoryStorage("two")
    one.begin("step-1")
    assert one.folders() == ["step-1"]
    assert two.folders() == []
    assert (one.name, two.name) == ("one", "two")


def test_what_was_read_does_not_change_with_the_file():
    storage = MemoryStorage()
    storage.begin(".a")
    storage.put(".a", "f", b"before")
    data = storage.read(".a", "f", 10)
    view = storage.take(".a", "f").map(0, 6)
    storage.writer(".a", "f").write(0, [memoryview(b"after!")])
    assert data == b"before"
    assert bytes(view) == b"before"
    assert storage.read(".a", "f", 10) == b"after!"
