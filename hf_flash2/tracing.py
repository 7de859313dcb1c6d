"""What is compiled, and what Dynamo knows of a graph that it traces, and traced code cannot ask: where position_ids come from."""

import operator
import threading
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# What a mask of Transformers is made of beside the pattern, by the names of the arguments that bring it. The first is one of every function
# that asks for a mask, and of no other.
OVERLAYS = ("or_mask_function", "and_mask_function", "block_sequence_ids")
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")
_WRITES = {getattr(operator, name) for name in ("setitem", *_IN_PLACE)}
_COUNTS_FAR = (torch.int32, torch.int64)  # narrower ones begin anew behind their last number, and floating point leaves numbers out


class _Answers(threading.local):
    """Of each thread, from what Dynamo runs, which cannot return anything to traced code."""

    def __init__(self):
        self.given: list[bool] = []


_answers = _Answers()
_MODES_OF_TRACERS = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_compiling() -> bool:
    """Whether this thread traces code, for torch.compile or torch.export. Of torch.compiler.is_compiling(), torch 2.13 and later make one
    flag of the process, which is True in all threads while one compiles."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES_OF_TRACERS)


def masks_hold_no_documents() -> bool:
    """While compiling, called by a mask function: whether the mask that Transformers asks for has certainly no documents, nor an overlay.

    So it is where the model itself counts its positions up, from `torch.arange`, or has none. Those that are given may begin anew, and
    cannot be looked at. False wherever nothing is known, as in a trace that is not Dynamo's.
    """
    from torch._dynamo.comptime import comptime  # here, as Dynamo takes a second to import

    comptime(_look)
    return _answer()


def counts_up(position_ids: torch.Tensor) -> bool:
    """While compiling: whether these are certainly 0, 1, 2 .. from any number on, as where the model itself has made them."""
    from torch._dynamo.comptime import comptime

    comptime(_look_at_positions)
    return _answer()


@torch.compiler.assume_constant_result
def _answer() -> bool:
    return bool(_answers.given) and _answers.given.pop()


def _look(context: Any) -> None:
    """Run by Dynamo, with what it knows: the local variables of who asked for the mask."""
    _answers.given.clear()
    asks = next((level for level in range(1, 6) if _local(context, OVERLAYS[0], level) is not None), None)
    if asks is None:
        return
    positions, *overlays = (_local(context, name, asks) for name in ("position_ids", *OVERLAYS))
    if positions is not None and all(overlay is None or _is_none(overlay) for overlay in overlays):
        _answers.given.append(_is_none(positions) or _is_counted_up(positions))


def _look_at_positions(context: Any) -> None:
    _answers.given.clear()
    positions = _local(context, "position_ids", 0)
    _answers.given.append(positions is not None and _is_counted_up(positions))


def _is_counted_up(positions: Any) -> bool:
    return positions.python_type() is torch.Tensor and _counts_up(positions.as_proxy().node)


def _local(context: Any, name: str, level: int) -> Any | None:
    """A local variable of a caller, None where there is no such variable, or no such caller."""
    try:
        return context.get_local(name, stacklevel=level)
    except (KeyError, AttributeError, AssertionError):
        return None


def _is_none(variable: Any) -> bool:
    return variable.is_python_constant() and variable.as_python_constant() is None


def _counts_up(node: torch.fx.Node) -> bool:
    """Whether a tensor of a graph is 0, 1, 2 .. from any number on, in every row."""
    if _is_written_to(node) or node.meta["example_value"].dtype not in _COUNTS_FAR:
        return False
    if node.op == "call_function" and node.target is torch.arange:
        return len(node.args) < 3 and not {"step", "out"} & node.kwargs.keys()
    if node.op == "call_function" and node.target is operator.add:
        tensors = [value for value in node.args if _is_tensor(value)]
        return len(tensors) == 1 and _counts_up(tensors[0])
    if node.op != "call_method":
        return False
    sizes = (*node.args[1:], *node.kwargs.values())
    is_row = node.target == "unsqueeze" and sizes == (0,)
    is_rows = node.target == "expand" and len(sizes) == 2 and sizes[1] == -1
    return (is_row or is_rows) and _counts_up(node.args[0])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)


def _is_written_to(node: torch.fx.Node) -> bool:
    """Whether a tensor of a graph, or a view of it, is changed in place so far."""
    if not _is_tensor(node):
        return True  # nobody knows
    reached, memory = [node], _storage_of(node)
    for made in reached:
        for user in made.users:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            in_place = user.target in _WRITES or name.endswith("_")
            is_mutable = getattr(getattr(user.target, "_schema", None), "is_mutable", False)  # a custom op, of any of its arguments
            written = [user.kwargs.get("out"), *((user.args[:1], user.kwargs.get("input"), user.kwargs.get("self")) if in_place else ())]
            if is_mutable or made in tree_leaves(written):  # several at once, too
                return True
            if user not in reached and (not _is_tensor(user) or _storage_of(user) == memory):  # no tensor: several, of which some are views
                reached.append(user)
    return False


def _storage_of(node: torch.fx.Node) -> int:
    """Which memory a tensor of a graph has, inside torch.func.grad that of the tensor in its wrapper; its views have the same."""
    tensor = node.meta["example_value"]
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata
