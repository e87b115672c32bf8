"""What may stand in a checkpoint: values that `torch.load(weights_only=True)` reads back on any machine."""

__all__ = ["require_plain"]


def require_plain(value: object, name: str) -> None:
    """Check that `value` is made of dict (keys str), list, str, int, float, bool and None only.

    Raises:
        ValueError: names the first entry that is something else, for instance a DictConfig or a functools.partial.
    """
    if type(value) is dict:
        for key, entry in value.items():
            if type(key) is not str:
                raise ValueError(f"{name} has the key {key!r}, but the keys of plain values are strings.")
            require_plain(entry, f"{name}.{key}")
    elif type(value) is list:
        for index, entry in enumerate(value):
            require_plain(entry, f"{name}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it takes"
            " dicts, lists, strings and numbers only. OmegaConf.to_container(config, resolve=True) gives them."
        )
