"""Every module of the package can be imported."""

import importlib
import pkgutil

import vembed


def test_every_module_can_be_imported():
    for module in pkgutil.walk_packages(vembed.__path__, "vembed."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
