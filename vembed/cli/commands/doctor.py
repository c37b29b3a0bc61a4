"""`vembed doctor`: hardware and software of this machine, a self-test of sharded training, and checks of a config."""

from typing import Annotated, Any

from typer import Argument

from vembed.cli.support import LINE, PositiveNumber, option, print_lines
from vembed.evaluation.report.record import collect_versions

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
    versions = collect_versions()
    optional = []
    for name in OPTIONAL_PACKAGES:
        optional.append(f"{name}: {versions.pop(name, 'not installed')}")
    installed = [f"{name} {version}" for name, version in versions.items()]
    machine = [", ".join(installed), *optional]
    print_lines("vembed doctor", LINE, *machine)
    try:
        import torch  # noqa: F401
    except Exception as error:  # a build for other libraries fails in many ways
        problem = f"{type(error).__name__}: {error}"
        print_lines(f"torch cannot be imported ({problem}): FAIL")
        return {"passed": False, "machine": machine, "torch": problem}, 1
    from vembed.cli.machine_checks import check_machine

    return check_machine(config, nproc, machine)
