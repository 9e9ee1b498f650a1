"""Which globals a pickle has no honest reason to call: those that run code, touch files, processes or the network.

Nothing of a file is ever called, so none of them could do harm here. But a checkpoint that *tries* is neither damaged
nor written by a program that we do not know: it is an attack, or was made for one, and the user must hear of it. The
list need not be complete to be safe; it decides only between an error and a stand-in that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Packages in which nothing is data.
_PACKAGES: Final = frozenset(
    {
        *(
            "os",
            "posix",
            "nt",
            "sys",
            "subprocess",
            "_posixsubprocess",
            "pty",
            "shutil",
            "commands",
            "popen2",
            "_winapi",
        ),
        *(
            "importlib",
            "_frozen_importlib",
            "_frozen_importlib_external",
            "imp",
            "_imp",
            "runpy",
            "pkgutil",
            "zipimport",
        ),
        *("pickle", "_pickle", "cPickle", "marshal", "shelve", "joblib", "ctypes", "_ctypes", "cffi", "mmap", "gc"),
        *("socket", "_socket", "socketserver", "ssl", "http", "urllib", "urllib2", "urllib3", "requests", "httpx"),
        *("ftplib", "smtplib", "telnetlib", "poplib", "imaplib", "nntplib", "xmlrpc", "webbrowser", "paramiko"),
        *("threading", "_thread", "multiprocessing", "asyncio", "sched", "atexit", "faulthandler", "resource"),
        *("fcntl", "winreg"),
        *("pdb", "bdb", "codeop", "cProfile", "timeit", "doctest", "pydoc", "linecache", "rlcompleter", "idlelib"),
        *("pip", "ensurepip", "venv", "setuptools", "distutils", "pkg_resources", "compileall", "py_compile", "site"),
        *("io", "_io", "tempfile", "fileinput", "glob", "tarfile", "zipfile", "sqlite3", "_sqlite3", "antigravity"),
    }
)

# Names in modules that also hold data; "*" is every name, also in modules below.
_NAMES: Final[dict[str, frozenset[str]]] = {
    "builtins": frozenset(
        {
            *("eval", "exec", "execfile", "compile", "__import__", "__build_class__", "reload", "apply", "breakpoint"),
            *("open", "file", "input", "raw_input", "print", "exit", "quit", "help"),
            *("setattr", "delattr", "globals", "locals", "vars"),
        }
    ),
    "code": frozenset({"interact", "compile_command", "InteractiveConsole", "InteractiveInterpreter"}),
    "codecs": frozenset({"open"}),
    "logging.config": frozenset({"*"}),
    "numpy": frozenset({"load", "save", "savez", "fromfile", "memmap", "loadtxt", "savetxt", "genfromtxt"}),
    "numpy.distutils": frozenset({"*"}),
    "numpy.f2py": frozenset({"*"}),
    "numpy.testing": frozenset({"*"}),
    "pandas": frozenset({"eval", "read_pickle"}),
    "pandas.io.pickle": frozenset({"*"}),
    "platform": frozenset({"popen", "_syscmd_file", "_syscmd_ver"}),
    "profile": frozenset({"run", "runctx", "Profile"}),
    "signal": frozenset({"signal", "alarm", "setitimer", "raise_signal", "pthread_kill"}),
    "torch": frozenset({"load", "save", "compile"}),
    "torch._inductor": frozenset({"*"}),
    "torch.classes": frozenset({"load_library"}),
    "torch.distributed.rpc": frozenset({"*"}),
    "torch.hub": frozenset({"*"}),
    "torch.jit": frozenset({"load", "CompilationUnit"}),
    "torch.ops": frozenset({"load_library"}),
    "torch.package": frozenset({"*"}),
    "torch.serialization": frozenset({"load", "save", "_load", "_legacy_load"}),
    "torch.utils.cpp_extension": frozenset({"*"}),
    "torch.utils.model_zoo": frozenset({"*"}),
    "trace": frozenset({"Trace"}),
    "transformers.dynamic_module_utils": frozenset({"*"}),
    "types": frozenset({"CodeType", "FunctionType", "LambdaType", "MethodType"}),
}
_WHOLE_MODULES: Final = tuple(module for module, names in _NAMES.items() if "*" in names)

# Plain records in the packages above that honest programs do keep.
_DATA: Final = frozenset(
    {
        *(("os", "stat_result"), ("posix", "stat_result"), ("os", "terminal_size"), ("posix", "uname_result")),
        *(("io", "BytesIO"), ("_io", "BytesIO"), ("io", "StringIO"), ("_io", "StringIO")),
        *(("urllib.parse", "ParseResult"), ("urllib.parse", "SplitResult")),
    }
)

# Callables that call what they are given: data around a class, an attempt around a dangerous one.
CALLERS: Final = frozenset(
    {
        *("functools.partial", "functools.partialmethod", "functools.reduce", "builtins.map", "builtins.filter"),
        *("itertools.starmap", "itertools.accumulate", "itertools.takewhile", "itertools.dropwhile", "operator.call"),
        *("collections.defaultdict", "torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"),
        *("torch._utils._rebuild_wrapper_subclass", "weakref.finalize"),
    }
)
# What these make is a call in waiting: data to have, an attempt to call.
CALLS_IN_WAITING: Final = frozenset(
    {
        *("functools.partial", "functools.partialmethod", "builtins.getattr", "operator.attrgetter"),
        *("operator.methodcaller", "operator.itemgetter"),
    }
)

_PYTHON_2: Final = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "_functools": "functools",
    "_operator": "operator",
}


def modern_module(module: str) -> str:
    """The name by which this module knows `module`: Python 3's for those of Python 2, the public one for C's."""
    return _PYTHON_2.get(module, module)


def is_dangerous(module: str, qualname: str) -> bool:
    """Whether calling `qualname` of `module` would run code, or touch files, processes or the network."""
    module = modern_module(module)
    parts = qualname.split(".")
    if (module, qualname) in _DATA:
        return False
    if module.split(".", 1)[0] in _PACKAGES or parts[0] in _NAMES.get(module, ()):
        return True
    if any(module == whole or module.startswith(whole + ".") for whole in _WHOLE_MODULES):
        return True
    # A module that another one imported (`torch.serialization` + `os.system`), or a way around it (`f.__globals__`).
    return any(part in _PACKAGES for part in parts[:-1]) or any(_is_dunder(part) for part in parts[len(parts) == 1 :])


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def suspicious(names: Iterable[tuple[str, str]]) -> list[str]:
    """Of the globals (module, qualname) that a pickle mentions, the paths that would be dangerous to call, sorted."""
    return sorted(f"{module}.{qualname}" for module, qualname in set(names) if is_dangerous(module, qualname))
