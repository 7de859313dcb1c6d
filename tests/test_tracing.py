"""tracing.py: which position_ids hold no documents for certain, said while a graph is traced."""

import pytest
import torch

from hf_flash2 import tracing

pytestmark = pytest.mark.timeout(60)


def ask_for_mask(position_ids, or_mask_function=None, and_mask_function=None, block_sequence_ids=None):
    """As Transformers does: the arguments are local variables of who calls the mask function."""
    return mask_function()


def mask_function():
    return tracing.masks_hold_no_documents()


def answer(ask, *inputs, dynamic=None):
    said = []

    def forward(x, *others):
        said.append(ask(x, *others))
        return x + 1

    torch.compiler.reset()
    torch.compile(forward, backend="eager", fullgraph=True, dynamic=dynamic)(torch.zeros(2, 6), *inputs)
    [found] = said
    return found


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "positions",
    [
        lambda x: torch.arange(x.shape[1]).unsqueeze(0),
        lambda x: torch.arange(x.shape[1]).unsqueeze(dim=0),
        lambda x: (torch.arange(x.shape[1], device=x.device) + 3).unsqueeze(0),
        lambda x: torch.arange(3, 3 + x.shape[1]).unsqueeze(0),
        lambda x: torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1),
        lambda x: None,
    ],
)
def test_positions_that_the_model_counts_up(positions, dynamic):
    assert answer(lambda x: ask_for_mask(positions(x)), dynamic=dynamic) is True


@pytest.mark.parametrize(
    "positions",
    [
        lambda x, given: given,
        lambda x, given: given + 1,
        lambda x, given: torch.arange(x.shape[1]) + given,
        lambda x, given: torch.arange(0, 12, 2).unsqueeze(0),
        lambda x, given: torch.arange(0, 12, step=2).unsqueeze(0),
        lambda x, given: torch.arange(6).unsqueeze(1),
        lambda x, given: torch.arange(6).remainder(3).unsqueeze(0),
        lambda x, given: [0, 1, 2, 0, 1, 2],
        lambda x, given: torch.cat((torch.arange(3), torch.arange(3))).unsqueeze(0),
    ],
)
def test_positions_that_may_begin_anew(positions):
    assert answer(lambda x, given: ask_for_mask(positions(x, given)), torch.arange(6)[None]) is False


@pytest.mark.parametrize("overlay", ["or_mask_function", "and_mask_function", "block_sequence_ids"])
def test_an_overlay_is_no_plain_mask(overlay):
    assert answer(lambda x: ask_for_mask(None, **{overlay: lambda *indices: True})) is False
    assert answer(lambda x: ask_for_mask(None, **{overlay: x})) is False


def restart_in_place(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    positions[:, 3:] -= 3
    return positions


def restart_through_a_view(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    positions.view(2, 3).select(0, 1).sub_(3)
    return positions


def restart_with_out(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    torch.remainder(positions, 3, out=positions)
    return positions


def restart_behind_an_addition(x):
    positions = torch.arange(x.shape[1]) + 2
    positions[3:] -= 5
    return positions.unsqueeze(0)


def restart_one_of_two_halves(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    positions.chunk(2, 1)[1].sub_(3)
    return positions


def restart_by_shifts(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    half = positions[:, 2:]
    half >>= 1
    return positions


def restart_in_a_buffer(x):
    buffer = torch.empty(x.shape[1], dtype=torch.int64)
    positions = torch.arange(x.shape[1], out=buffer)
    buffer[3:] -= 3
    return positions.unsqueeze(0)


@torch.library.custom_op("hf_flash2_tests::restart", mutates_args={"positions"})
def restart(positions: torch.Tensor) -> None:
    positions[3:] -= 3


def restart_by_a_custom_op(x):
    positions = torch.arange(x.shape[1])
    restart(positions)
    return positions.unsqueeze(0)


def restart_one_of_several(x):
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    torch._foreach_sub_([torch.ones(3), positions[:, 3:]], 3)
    return positions


def restart_with_several_out(x):
    positions = torch.arange(x.shape[1])
    torch.sort(torch.tensor([0, 3, 1, 4, 2, 5]), out=(torch.empty(6, dtype=torch.int64), positions))
    return positions.unsqueeze(0)


def restart_by_name(x):
    positions = torch.arange(x.shape[1])
    torch.clamp_(input=positions, max=2)
    return positions.unsqueeze(0)


WRITES = [
    restart_behind_an_addition, restart_in_place, restart_through_a_view, restart_one_of_two_halves, restart_with_out, restart_by_shifts,
    restart_in_a_buffer, restart_by_a_custom_op, restart_one_of_several, restart_with_several_out, restart_by_name,
]  # fmt: skip


@pytest.mark.parametrize("positions", WRITES)
def test_positions_that_were_written_to(positions):
    assert answer(lambda x: ask_for_mask(positions(x))) is False


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: (torch.arange(x.shape[1]) % 3).unsqueeze(0),
        lambda x: (torch.arange(x.shape[1]) // 2).unsqueeze(0),
        lambda x: (torch.arange(x.shape[1]) * 2).unsqueeze(0),
        lambda x: torch.flip(torch.arange(x.shape[1]), (0,)).unsqueeze(0),
        lambda x: torch.arange(6).cumsum(0).unsqueeze(0),
        lambda x: torch.arange(6).clamp(0).unsqueeze(0).flip(0),
        lambda x: torch.arange(1).unsqueeze(0).expand(-1, 6),
    ],
)
def test_positions_that_are_computed_with(positions):
    assert answer(lambda x: ask_for_mask(positions(x))) is False


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: torch.arange(300, dtype=torch.uint8).unsqueeze(0),
        lambda x: torch.arange(200, 300, dtype=torch.uint8).unsqueeze(0),
        lambda x: (torch.arange(100, dtype=torch.uint8) + 200).unsqueeze(0),
        lambda x: (torch.arange(100, dtype=torch.int8) + 100).unsqueeze(0).expand(2, -1),
        lambda x: torch.arange(40000, dtype=torch.int16).unsqueeze(0),
        lambda x: torch.arange(4096, dtype=torch.float16).unsqueeze(0),  # of numbers this large it knows every other
    ],
)
def test_positions_of_a_dtype_that_cannot_count_this_far(positions):
    assert positions(None).double().diff().ne(1).any()
    assert answer(lambda x: ask_for_mask(positions(x))) is False


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_a_dtype_that_can(dtype):
    assert answer(lambda x: ask_for_mask((torch.arange(300, dtype=dtype) + 200).unsqueeze(0))) is True


def ask_for_mask_in_older_words(position_ids, or_mask_function=None, and_mask_function=None):
    return mask_function()


def test_an_overlay_that_this_version_does_not_have():
    assert answer(lambda x: ask_for_mask_in_older_words(torch.arange(x.shape[1]).unsqueeze(0))) is True


def ask_for_mask_without_positions(or_mask_function=None, and_mask_function=None):
    """As the masks of encoders do, which are no causal ones, whatever positions their model has."""
    return mask_function()


def test_only_who_asks_for_the_mask_says_where_positions_come_from():
    def model(x):
        position_ids = torch.arange(x.shape[1]).unsqueeze(0)
        return ask_for_mask_without_positions() and position_ids is not None

    assert answer(model) is False


def test_an_answer_is_that_of_its_own_question(monkeypatch):
    monkeypatch.setattr(tracing._answers, "given", [True])  # as if nobody had fetched one
    assert answer(lambda x: mask_function()) is False
    plain, given = lambda x: ask_for_mask(None), lambda x: ask_for_mask(x)
    assert answer(lambda x: (plain(x), given(x), plain(x))) == (True, False, True)


def test_what_is_made_of_positions_may_be_written_to():
    """As models do with what they compute from them, when later layers ask."""

    def model(x):
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        hidden = x + positions.float()
        hidden.add_(positions)
        hidden[0, positions] = 3.0
        return tracing.counts_up(positions)

    assert answer(model) is True


@pytest.mark.parametrize("made", [True, False])
def test_positions_that_a_layer_is_handed(made):
    def layer(**kwargs):
        return tracing.counts_up(kwargs["position_ids"])

    assert answer(lambda x, given: layer(position_ids=torch.arange(6)[None] if made else given), torch.arange(6)[None]) is False
    assert answer(lambda x, given: layer(position_ids=torch.arange(6).unsqueeze(0) if made else given), torch.arange(6)[None]) is made


def test_nothing_is_known_elsewhere():
    assert answer(lambda x: mask_function()) is False  # nobody has position_ids
    assert ask_for_mask(None) is False  # nothing is traced
