"""`vembed doctor`: hardware and software of this machine, a self-test of sharded training, and checks of a config."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from typer import Argument

import vembed
from vembed.cli.support import LINE, PositiveNumber, option, print_lines

PACKAGES = ("torch", "accelerate", "transformers", "peft", "datasets", "safetensors")
OPTIONAL_PACKAGES = ("flash-attn", "bitsandbytes", "torchao")


def doctor(
    config: Annotated[str | None, Argument(metavar="CFG")] = None,
    nproc: PositiveNumber = None,
    model_class: str | None = None,
    model_config: str = "",
) -> tuple[Any, int]:
    """Check this machine: versions, devices, and a sharded self-test on several processes.

    Exit code 1 if a check fails.

    Args:
        config: Check the machine for this config too.
        nproc: Default: one per GPU, or 2 on the CPU.
        model_class: Check a class of your own instead: FILE.py:Class or package.module:Class.
        model_config: Its keyword arguments, as {size: 64}.
    """
    if model_class is not None:
        from vembed.cli.check_class import check_model

        arguments = option("model_arguments", model_config)
        print_lines(model_class, LINE)
        code = 0
        for number, (rule, problem) in enumerate(
            check_model(model_class, arguments), start=1
        ):
            state = "pass" if problem is None else f"FAIL: {problem}"
            print_lines(f"{number}. {rule}: {state}")
            code = code if problem is None else 1
        return None, code
    system = f"{platform.system()} {platform.machine()}"
    machine = [
        f"vembed {vembed.__version__}, Python {platform.python_version()}, {system}",
        ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES),
    ]
    machine += [f"{name}: {installed_version(name)}" for name in OPTIONAL_PACKAGES]
    print_lines("vembed doctor", LINE, *machine)
    try:
        import torch  # noqa: F401
    except Exception as error:  # a build for other libraries fails in many ways
        problem = f"{type(error).__name__}: {error}"
        print_lines(f"torch cannot be imported ({problem}): FAIL")
        return {"passed": False, "machine": machine, "torch": problem}, 1
    from vembed.cli.machine_checks import check_machine

    return check_machine(config, nproc, machine)


def installed_version(package: str) -> str:
    """Return the version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
