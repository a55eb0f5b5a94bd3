"""Cores are divided among the ranks of a machine: none twice, on the GPU's own NUMA node where that is known."""

from hypothesis import given
from hypothesis import strategies as st

from greenroom.vllm_plugin.binding import Share, divide_cores, gpu_node, rank_cores, rank_homes


def parts(cores, nodes, gpu_nodes, count):
    return [divide_cores(cores, nodes, Share(i, count, True, tuple(gpu_nodes))) for i in range(count)]


def test_a_rank_alone_gets_all_cores():
    assert divide_cores([0, 1, 2], [], Share(0, 1, True)) == [0, 1, 2]


def test_ranks_get_the_cores_of_their_gpus_nodes():
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts(list(range(8)), nodes, [1, 0], 2) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert parts(list(range(8)), nodes, [0, 0, 1, 1], 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_container_that_has_no_core_of_a_node():
    assert parts([0, 1, 2, 3], [[0, 1, 2, 3], [4, 5]], [1, 1], 2) == [[0, 1], [2, 3]]


def test_unknown_nodes_divide_evenly():
    assert parts(list(range(6)), [[0, 1, 2], [3, 4, 5]], [None, 0], 2) == [[0, 1, 2], [3, 4, 5]]


def test_more_ranks_than_cores_share():
    assert parts([3], [], [], 2) == [[3], [3]]


@given(
    st.sets(st.integers(0, 31), min_size=1),
    st.integers(1, 8),
    st.data(),
)
def test_no_core_twice_and_none_that_is_not_usable(cores, count, data):
    nodes = [list(range(16)), list(range(16, 32))]
    gpus = data.draw(st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count))
    found = parts(sorted(cores), nodes, gpus, count)
    assert all(found)
    assert all(set(part) <= cores for part in found)
    local = [sum(gpu == node for gpu in gpus) <= len(cores & set(nodes[node])) for node in set(gpus)]
    if all(local):
        assert len(set().union(*map(set, found))) == sum(map(len, found))


def test_a_core_is_left_to_the_gpus_thread(monkeypatch):
    monkeypatch.setattr("greenroom.vllm_plugin.binding.hardware.usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("greenroom.vllm_plugin.binding.numa.node_cores", list)
    monkeypatch.setattr("greenroom.vllm_plugin.binding.hardware.may_pin", lambda: False)
    assert rank_cores(None, Share(0, 1, beside_gpu=True)) == (3, None)
    monkeypatch.setattr("greenroom.vllm_plugin.binding.hardware.may_pin", lambda: True)
    assert rank_cores(None, Share(0, 1, beside_gpu=True)) == (3, [1, 2, 3])
    assert rank_cores(None, Share(1, 2, beside_gpu=False)) == (2, [2, 3])
    assert rank_cores(2, Share(0, 1, beside_gpu=True)) == (2, [2, 3])
    assert rank_cores(9, Share(0, 1, beside_gpu=True)) == (9, None)


def test_memory_lies_on_the_nodes_of_a_ranks_cores(monkeypatch):
    monkeypatch.setattr("greenroom.vllm_plugin.binding.hardware.usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("greenroom.vllm_plugin.binding.numa.node_cores", lambda: [[0, 1], [2, 3]])
    assert rank_homes(Share(1, 2, beside_gpu=True, nodes=(0, 1))) == [[2, 3]]
    assert rank_homes(Share(0, 1, beside_gpu=True)) == [[0, 1], [2, 3]]
    monkeypatch.setattr("greenroom.vllm_plugin.binding.numa.node_cores", lambda: [[0, 1, 2, 3]])
    assert rank_homes(Share(0, 1, beside_gpu=True)) == []


def test_what_the_system_says(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    assert gpu_node("0000:3B:00.0", tmp_path) == 1
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert gpu_node("0000:3b:00.0", tmp_path) is None
    assert gpu_node("0000:ff:00.0", tmp_path) is None
