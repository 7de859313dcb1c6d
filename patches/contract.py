"""Which models can run packed, and which can do without logits: what `patch(model, packed=True)` has to know, read from the model's code.

A model is taken when the forwards of its classes show that packing changes nothing, and refused with the reason when they do not: a list
of names would miss the new ones, and trust the changed ones.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.loss.loss_utils import ForCausalLMLoss

from ..masks import leaves_window_to_mask
from .binding import LAYER

CACHES = ("past_key_values", "cache")  # what the forwards of models call their cache, before Transformers 5.24 and since
_NO_SOURCE = "the source of its forward cannot be read"


def reason_not_packable(model: PreTrainedModel, attention_layers: Collection[nn.Module]) -> str | None:
    """Why a model cannot run packed, as a sentence; None when it can. Read from the modules and from the sources of their classes.

    Args:
        attention_layers: the modules whose attention runs on hf_flash2. Rows packed into one are safe only where nothing else mixes
            tokens, where the sequences reach every attention, and where the mask is used for nothing but attention.
    """
    try:
        return _reason_not_packable(model, attention_layers)
    except OSError:
        return _NO_SOURCE


def _reason_not_packable(model: PreTrainedModel, attention_layers: Collection[nn.Module]) -> str | None:
    base = packed_part(model)
    name = type(base).__name__
    takes = inspect.signature(type(base).forward).parameters
    missing = [argument for argument in ("attention_mask", "position_ids", "inputs_embeds") if argument not in takes]
    if not takes.keys() & set(CACHES):
        missing.append(CACHES[-1])
    if missing:
        return f"the forward of its {name} has no {', '.join(missing)}"
    if "start_positions" in inspect.signature(type(model).forward).parameters:
        return "its head chooses among all positions of a row, and at padding a packed model has zeros"
    layers = getattr(base.config, "num_hidden_layers", None)
    if layers is None and base.config.sub_configs:
        return "it is made of several models, and its get_decoder() does not say which of them is its language model"
    if base is not base_of(model):
        for above in (module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not base):
            inside = [name for name, child in above.named_children() if any(module is base for module in child.modules())]
            if inside and not _hands_on_the_mask(_forward_tree(type(above)), {"base_model", *inside}):
                return f"it is made of several models, and its {type(above).__name__} does not hand its attention_mask on as it came"
    if len(attention_layers) != layers:
        return f"it has {layers} layers, and the attention of {len(attention_layers)} runs on hf_flash2"
    for path, module in base.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.BatchNorm1d)):
            return f"its {path} mixes neighbouring tokens, which may be of different rows"
        if _is_above(module, attention_layers) and not _hands_on_keyword_arguments(type(module)):
            return f"its {type(module).__name__} does not hand on the keyword arguments that tell the attention where rows begin"
    tree = _forward_tree(type(base))
    makers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("create_")}
    if not makers:
        return f"its {name} does not make Transformers' causal mask itself, the one that packing knows how to replace"
    if "create_causal_mask" not in makers or makers - _MASKS - {"create_bidirectional_mask"}:  # that one: GPT-2's, of the encoder's tokens
        return f"its {name} makes masks other than causal ones with or without a window ({', '.join(sorted(makers))})"
    if "create_sliding_window_causal_mask" in makers and leaves_window_to_mask(base.config):  # else no layer has that window
        return "its layers leave their sliding window to the mask, and packed rows have none"
    other_use = _other_use_of_the_mask(tree)
    if other_use is not None:
        return f"its {name} uses the attention mask for more than attention ({other_use})"
    if not _numbers_tokens_from_zero(tree):
        return f"its {name} is not seen to number tokens from 0 without position_ids, and by nothing else with them"
    return None


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The base model, inside FullyShardedDataParallel where that wraps it by itself."""
    return getattr(model.base_model, "_fsdp_wrapped_module", model.base_model)


def packed_part(model: PreTrainedModel) -> PreTrainedModel:
    """What of a model runs packed: its base model, or the language model of one that is made of several, such as one that sees images."""
    base = base_of(model)
    if base.config.is_encoder_decoder or not base.config.sub_configs:
        return base
    decoder = base.get_decoder()
    decoder = getattr(decoder, "_fsdp_wrapped_module", decoder)
    return decoder if isinstance(decoder, PreTrainedModel) else base


def _is_above(module: nn.Module, attention_layers: Collection[nn.Module]) -> bool:
    """Whether the sequences pass through the module's own forward on their way to our attention."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return any(layer in attention_layers and not (layer is module and vars(layer)[LAYER].forward) for layer in module.modules())


def _forward_tree(module_class: type) -> ast.AST:
    """The syntax tree of the forward of a module's class (of the class it is inherited from: FSDP puts one of its own first)."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module_class.forward))))


def _hands_on_keyword_arguments(module_class: type) -> bool:
    if module_class.__module__.startswith("torch._dynamo."):  # torch.compile around a layer: its instances alone have a forward, for any
        return True
    tree = _forward_tree(module_class)
    own = tree.body[0].args.kwarg  # **kwargs, whatever its name
    keywords = (keyword for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords)
    return own is not None and any(keyword.arg is None and ast.unparse(keyword.value) == own.arg for keyword in keywords)


def _hands_on_the_mask(tree: ast.AST, names: set[str]) -> bool:
    """Whether a forward gives its attention_mask, and never another by that name, to the model inside wherever it calls that, or masks that
    Transformers' functions make of it: where those are ours, they say all that packing has to know (packed.py looks at each)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"self.{name}" for name in names}]
    given = [{keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("attention_mask") for call in calls]
    stored = any(isinstance(x, ast.Name) and x.id == "attention_mask" and not isinstance(x.ctx, ast.Load) for x in ast.walk(tree))
    if stored or len(set(given)) != 1 or given[0] is None:
        return False
    return given[0] == "attention_mask" or (hasattr(masking_utils, "blockwise_overlay") and _is_made_as_a_mask(tree, given[0]))


def _is_made_as_a_mask(tree: ast.AST, name: str) -> bool:
    """Whether nothing is ever called so but masks of Transformers, by the kind of layer or not, and the attention_mask."""

    def is_mask(value: ast.AST | None) -> bool:
        if isinstance(value, ast.Dict):
            return all(map(is_mask, value.values))
        if isinstance(value, ast.Name):
            return value.id in ("attention_mask", name)
        return isinstance(value, ast.Call) and ast.unparse(value.func) in _MASKS | _MASKS_BY_KIND

    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)]
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.NamedExpr))
        and [*map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])] == [name]
    ]
    return bool(stored) and len(assigned) == len(stored) and all(map(is_mask, assigned))


def gives_keyword_argument(module_class: type, name: str) -> bool:
    """Whether its forward calls something with a keyword argument of this name; False where there is no source."""
    try:
        tree = _forward_tree(module_class)
    except (OSError, TypeError):
        return False
    return any(isinstance(node, ast.keyword) and node.arg == name for node in ast.walk(tree))


_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}
_MASKS_BY_KIND = {"create_masks_for_generate", "create_masks_for_vision_model"}
_USES_OF_A_MASK = _MASKS | {"mask_function", "isinstance", "self.warn_if_padding_and_no_attention_mask"}


def _other_use_of_the_mask(tree: ast.AST) -> str | None:
    """What the forward of a base model does with its attention_mask beside making the mask of the attention from it."""
    parents = _parents(tree)
    # From there on the name is that of the attention's mask.
    made = next((node.end_lineno for node in tree.body[0].body if _makes_the_mask(node)), sys.maxsize)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Name) and node.id == "attention_mask") or node.lineno > made:
            continue
        parent = parents[node]
        call = parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(call, ast.Call):
            if ast.unparse(call.func) not in _USES_OF_A_MASK:
                return ast.unparse(call)
        elif not (isinstance(node.ctx, ast.Store) or _keeps_to_itself(parent)):
            use = ast.unparse(_statement(node, parents))
            if use != "attention_mask = attention_mask.view(batch_size, -1)":  # GPT-2's, to [B, S]
                return use
    return None


def _makes_the_mask(statement: ast.stmt) -> bool:
    """attention_mask = create_causal_mask(...)"""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
        return False
    return [*map(ast.unparse, statement.targets)] == ["attention_mask"] and ast.unparse(statement.value.func) in _MASKS


def _keeps_to_itself(parent: ast.AST) -> bool:
    """Whether an expression around the mask shows nothing of its values, and gives it no other name: that may go anywhere."""
    if isinstance(parent, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
    # The arguments of the functions that make masks, and the masks that a model was given ready-made.
    return isinstance(parent, (ast.Dict, ast.NamedExpr)) or getattr(parent, "attr", None) == "ndim"


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


# cache_position: what positions come from before Transformers 5.4.
_WITHOUT_POSITIONS = {"position_ids is None", "cache_position is None"}
_WITH_POSITIONS = {"position_ids is not None", "cache_position is not None"}


def _numbers_tokens_from_zero(tree: ast.AST) -> bool:
    """Whether a forward counts the columns of its input only for position_ids that it is not given.

    Depth decoders of audio choose codebooks by the column, whatever position_ids say, and a packed token has another; Kosmos-2.5 counts as
    fairseq does, from 2.
    """
    parents = _parents(tree)
    counts = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.arange"]
    replaced = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and _replaces_positions(node, parents)]
    return bool(counts) and all(_is_for_missing_positions(node, parents) for node in counts + replaced)


def _replaces_positions(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this gives position_ids a value that they are no part of."""
    if node.id != "position_ids" or not isinstance(node.ctx, ast.Store):
        return False
    value = getattr(_statement(node, parents), "value", None)
    return value is None or "position_ids" not in ast.unparse(value)


def _is_for_missing_positions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, (ast.If, ast.IfExp)):
            then, otherwise = ([arm] if isinstance(arm, ast.AST) else arm for arm in (node.body, node.orelse))
            tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
            if child in then and any(ast.unparse(test) in _WITHOUT_POSITIONS for test in tests):
                return True
            if child in otherwise and ast.unparse(node.test) in _WITH_POSITIONS:
                return True
    return False


# What a causal language model may do between its base model and its loss, for the loss to be that of head(last_hidden_state).
_PLAIN = {
    "logits": {"self.lm_head(hidden_states)", "self.lm_head(hidden_states[:, slice_indices, :])"},
    "hidden_states": {
        "outputs[0]", "outputs.last_hidden_state", "transformer_outputs[0]", "transformer_outputs.last_hidden_state",
        "slice_logits_to_keep(hidden_states, logits_to_keep)",
        "hidden_states.to(self.lm_head.weight.device)",
    },
    "loss": {"None"},
    "labels": {"labels.to(logits.device)", "labels.to(hidden_states.device)"},
}  # fmt: skip


@dataclass(frozen=True)
class LogitStep:
    """A scale, or a part of a cap."""

    op: str  # "/", "*" or "tanh"
    # Where the model has it, as its forward says: "self.config.logits_scaling", with "?" behind it if it may be missing; None there: there
    # is no such step.
    number: str | None
    line: int  # of the forward


_OF_THE_MODEL = re.compile(r"self(\.\w+|\.get_text_config\(\))+\??")


def reason_loss_is_upstream(model: PreTrainedModel) -> str | None:
    """Why the loss of a model cannot be computed from its last hidden states by its head alone; None when it can.

    Auxiliary losses and heads of another kind show in the source of the forward, as do scaled and capped logits (logit_steps).
    """
    if model.base_model is model or model.get_output_embeddings() is None:
        return "it has no language model head"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss function is its own"
    try:
        return _reason_loss_is_own(type(model))
    except OSError:
        return _NO_SOURCE


def logit_steps(model_class: type) -> tuple[LogitStep, ...]:
    """What a model whose loss may be computed by its head makes of the logits before, in order."""
    return _logit_steps(_forward_tree(model_class))


def _logit_steps(tree: ast.AST) -> tuple[LogitStep, ...]:
    steps, named = [], {}
    for statement in tree.body[0].body:
        named |= _names_a_number(statement)
        if "self.loss_function(" in ast.unparse(statement):  # behind it is another matter
            break
        if isinstance(statement, ast.If) and not statement.orelse and (number := _asked_for(statement.test, named)) is not None:
            found = [_logit_step(inner, names=number) for inner in statement.body]
            steps += found if all(found) else []
        elif (step := _logit_step(statement)) is not None:
            steps.append(step)
    return tuple(steps)


def _names_a_number(statement: ast.stmt) -> dict[str, str]:
    """Of NAME = getattr(WHERE, "number", None) the number, by its name."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call) and isinstance(statement.targets[0], ast.Name)):
        return {}
    function, arguments = statement.value.func, statement.value.args
    if ast.unparse(function) != "getattr" or len(arguments) != 3 or ast.unparse(arguments[2]) != "None":
        return {}
    where, number = arguments[:2]
    return {statement.targets[0].id: f"{ast.unparse(where)}.{number.value}?"} if isinstance(number, ast.Constant) else {}


def _asked_for(test: ast.AST, named: dict[str, str]) -> dict[str, str] | None:
    """Of `NUMBER is not None` the number, by the names that it then has; None of other tests. named: what names stand for."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"):
        return None
    walrus = test.left if isinstance(test.left, ast.NamedExpr) else None
    asked = ast.unparse(walrus.value if walrus else test.left)
    number = named.get(asked, asked)
    return {walrus.target.id if walrus else asked: number} if _OF_THE_MODEL.fullmatch(number) else None


def _logit_step(statement: ast.stmt, names: dict[str, str] | None = None) -> LogitStep | None:
    """logits = logits / NUMBER, or * NUMBER, or torch.tanh(logits). names: what stands for a number, and without which there is no step."""
    if not (isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == ["logits"]):
        return None
    value, ops = statement.value, {ast.Div: "/", ast.Mult: "*"}
    if isinstance(value, ast.BinOp) and type(value.op) in ops and ast.unparse(value.left) == "logits":
        number = ast.unparse(value.right)
        number = number if names is None else names.get(number, "another")
        return LogitStep(ops[type(value.op)], number, statement.lineno) if _OF_THE_MODEL.fullmatch(number) else None
    if ast.unparse(value) in ("torch.tanh(logits)", "nn.functional.tanh(logits)"):
        return LogitStep("tanh", next(iter((names or {}).values()), None), statement.lineno)
    return None


def _reason_loss_is_own(model_class: type) -> str | None:
    """What a forward does to hidden states, logits or loss beside what is known to be plain."""
    tree = _forward_tree(model_class)
    parents = _parents(tree)
    known_steps = {step.line for step in _logit_steps(tree)}
    makes_logits = False
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not any(isinstance(part, ast.Name) and part.id in _PLAIN for part in ast.walk(target)):
                    continue
                if node.lineno in known_steps or _adds_the_loss_of_a_router(node, tree, parents):
                    continue
                plain = isinstance(node, ast.Assign) and isinstance(target, ast.Name) and _is_plain(target.id, node.value)
                if not plain:
                    return f"its forward has {ast.unparse(node)}"
                makes_logits |= target.id == "logits"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.loss_function":
            target = getattr(parents[node], "targets", [None])[0]
            if not (_is_plain_loss(node, tree.body[0].args.kwarg) and isinstance(target, ast.Name) and target.id == "loss"):
                return f"its forward has {ast.unparse(_statement(node, parents))}"
        elif isinstance(node, ast.Name) and node.id in ("logits", "loss") and not _only_hands_on(node, parents):
            statement = _statement(node, parents)
            if statement.lineno not in known_steps:
                return f"its forward has {ast.unparse(statement)}"
    return None if makes_logits else "its forward does not make logits with lm_head"


_WANTED = re.compile(
    r"output_router_logits if output_router_logits is not None else self\.config(\.text_config)?\.output_router_logits"
)  # as wants_router_logits


def _adds_the_loss_of_a_router(node: ast.AST, tree: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """loss += ... where router logits are wanted: the packed loss is for calls that do not (wants_router_logits)."""
    if not (isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "loss" and isinstance(node.op, ast.Add)):
        return False
    assigned = (x for x in ast.walk(tree) if isinstance(x, ast.Assign))
    wanted = [ast.unparse(x.value) for x in assigned if [*map(ast.unparse, x.targets)] == ["output_router_logits"]]
    if len(wanted) != 1 or not _WANTED.fullmatch(wanted[0]):
        return False
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, ast.If) and child in node.body and ast.unparse(node.test) == "output_router_logits":
            return True
    return False


def _is_plain(name: str, value: ast.AST) -> bool:
    if name == "loss" and isinstance(value, ast.Call):
        return ast.unparse(value.func) == "self.loss_function"
    return ast.unparse(value) in _PLAIN[name]


def _is_plain_loss(call: ast.Call, keywords: ast.arg | None) -> bool:
    """Whether the loss function gets logits, labels, the vocabulary and the forward's own keyword arguments, and nothing else."""
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    positional = [*map(ast.unparse, call.args)]
    handed_on = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
    return (
        (positional[:2] or [named.get("logits"), named.get("labels")]) == ["logits", "labels"]
        and len(positional) <= 3 and not any(isinstance(argument, ast.Starred) for argument in call.args)
        and named.keys() <= {"logits", "labels", "vocab_size", "pad_token_id"}  # the last is XGLM's; the loss function takes no notice
        and keywords is not None and handed_on == [keywords.arg]
    )  # fmt: skip


def _only_hands_on(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether logits or loss are assigned, or go on as they are: to the loss function, to the output, into a comparison with None."""
    if isinstance(node.ctx, ast.Store):
        return True
    parent = parents[node]
    if isinstance(parent, ast.keyword):
        parent = parents[parent]
    if isinstance(parent, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
    if isinstance(parent, ast.Attribute):
        return parent.attr == "device"
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func) == "self.loss_function" or isinstance(parents[parent], ast.Return)
    return isinstance(parent, ast.Tuple)  # (loss,) + output


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node
