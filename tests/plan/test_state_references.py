from holdfast.plan.state_references import references, update_entry_references


def tree(value):
    return {"kind": "tensors", "value": value}


def ref(key):
    return {"$tensor": key}


def test_an_entry_that_is_true_stays_as_it_is():
    entry = tree({"a": ref("a"), "deep": [ref("deep.0"), 3]})
    assert update_entry_references(entry, ["a", "deep.0"]) is entry


def test_references_to_what_is_gone_go_too():
    value = {"a": ref("a"), "deep": [ref("deep.0"), ref("deep.1")], "n": 5}
    assert update_entry_references(tree(value), ["a", "deep.1"])["value"] == {
        "a": ref("a"),
        "deep": [None, ref("deep.1")],
        "n": 5,
    }
    ordered = {"$OrderedDict": [["a", ref("a")], ["b", ref("b")]]}
    assert update_entry_references(tree(ordered), ["b"])["value"] == {"$OrderedDict": [["b", ref("b")]]}


def test_without_any_tensor_it_is_a_plain_value():
    assert update_entry_references(tree({"a": ref("a"), "n": 5}), []) == {"kind": "json", "value": {"n": 5}}
    assert update_entry_references(tree(ref("a")), []) == {"kind": "json", "value": {}}


def test_new_keys_are_referred_to_whatever_the_value_was():
    for value, made in (
        ({"a": ref("a")}, {"x.y": ref("x.y")}),
        ({"$dict": [[5, ref("5")]]}, {"$dict": [["x.y", ref("x.y")]]}),
        ([ref("0")], {"x.y": ref("x.y")}),
        (ref("odd"), {"x.y": ref("x.y")}),
    ):
        found = update_entry_references(tree(value), ["x.y"])["value"]
        assert found == made
    assert update_entry_references(tree([ref("0"), 3]), ["0", "$x"])["value"] == {
        "$dict": [["0", ref("0")], ["$x", ref("$x")]]
    }


def test_what_differs_between_ranks_or_names_parameters_stays():
    for entry in ({"kind": "tensors", "axes": ["dp"], "sizes": [2], "values": {}}, {"kind": "optimizer", "groups": []}):
        assert update_entry_references(entry, ["a"]) is entry


def test_an_object_keeps_its_own_state_and_gets_no_keys():
    entry = {"kind": "stateful", "value": {"a": ref("a"), "b": ref("b")}}
    assert update_entry_references(entry, ["a", "c"]) == {"kind": "stateful", "value": {"a": ref("a")}}


def test_pairs_that_are_none_are_left_to_whoever_decodes_them():
    odd = {"$dict": [["a", ref("a"), 1], 7]}
    assert references(update_entry_references(tree({"x": odd, "b": ref("b")}), ["b"])["value"]) == {"b": "$tensor"}
