from holdfast.convert.sinks.base import tensor_files
from holdfast.convert.spans import SPAN_BLOCKS, first_touches, plan_spans, spans_of_rank
from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import Place, TensorSpec, split_group
from holdfast.plan.load_plan import StoredBlock, StoredFile
from holdfast.plan.recipe import Recipe

F32 = dtype_named("float32")
PLACES = (Place(TensorSpec("a", F32, (64, 64)), "s", 100), Place(TensorSpec("b", F32, (64,)), "s", 100 + 4 * 64 * 64))
STORED = StoredFile("s", tuple(StoredBlock(at, 1024, "") for at in range(0, 17 * 1024, 1024)), PLACES)


def whole(place):
    return Recipe.whole(place, place.spec.shape, F32)


def spans_of(recipes, block_bytes=1024, max_shard_bytes=10**9):
    specs = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in recipes.items()]
    files = tensor_files("model", split_group("model", specs, max_shard_bytes), recipes)
    return plan_spans(files, [STORED], block_bytes)


def test_blocks_follow_each_other_and_fill_their_files():
    spans = spans_of({"a": whole(PLACES[0]), "b": whole(PLACES[1])}, max_shard_bytes=10_000)
    ends: dict[str, int] = {}
    for block in (block for span in spans for block in span.blocks):
        assert block.offset == ends.get(block.file.plan.name, 0)
        ends[block.file.plan.name] = block.offset + block.size
    assert len(ends) == 2
    assert {b.file.plan.name: b.file.plan.size for span in spans for b in span.blocks} == ends
    assert all(len(span.blocks) == 1 for span in spans)


def test_blocks_that_reach_all_over_a_source_go_together():
    spans = spans_of({"a": whole(PLACES[0]).transposed(), "b": whole(PLACES[1])})
    sizes = [len(span.blocks) for span in spans]
    assert max(sizes) == SPAN_BLOCKS
    assert set(spans[0].touches) >= {("s", number) for number in range(16)}


def test_a_block_touches_the_source_blocks_that_its_bytes_lie_in():
    spans = spans_of({"b": whole(PLACES[1])})
    assert [span.touches for span in spans] == [(("s", 16),)]


def test_every_span_is_done_by_one_rank_and_every_source_block_verified_once():
    spans = spans_of({"a": whole(PLACES[0]), "b": whole(PLACES[1])}, max_shard_bytes=10_000)
    for whole_files in (False, True):
        shares = [spans_of_rank(spans, rank, 3, whole_files=whole_files) for rank in range(3)]
        assert sorted(number for share in shares for number in share) == list(range(len(spans)))
    assert all(len({rank for rank in range(3) if n in shares[rank]}) == 1 for n in range(len(spans)))
    owner = {spans[n].file: rank for rank, share in enumerate(shares) for n in share}
    assert all(owner[spans[n].file] == rank for rank, share in enumerate(shares) for n in share)
    fresh = [touched for found in first_touches(spans).values() for touched in found]
    assert len(fresh) == len(set(fresh)) == 17
