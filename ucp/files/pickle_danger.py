"""Which globals a pickle has no honest reason to call: those that run code, touch files, processes or the network.

Nothing of a file is ever called, so none of them could do harm here. But a checkpoint that *tries* is not a checkpoint
that was damaged or written by an unknown program: it is an attack, or it was meant for one, and the user must hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Whole modules: a call of anything inside them is refused.
_MODULES: Final = frozenset(
    """
    _aix_support _bootsubprocess _ctypes _frozen_importlib _frozen_importlib_external _imp _io _osx_support _posixshmem
    _posixsubprocess _pyrepl _socket _ssl _thread _winapi _xxsubinterpreters _interpreters aifc ast asyncio asyncore
    atexit bdb builtins.eval cProfile cgi cffi cloudpickle code codeop commands compileall concurrent cProfile cryptography
    ctypes dask dill dis distutils doctest ensurepip fabric faulthandler fileinput ftplib gc glob guppy http httplib
    idlelib imaplib imp importlib inspect io joblib jsonpickle lib2to3 linecache lzma.open marshal mmap modulefinder
    multiprocessing nntplib nt ntpath numexpr os paramiko pdb pexpect pickle pickletools pip pkg_resources pkgutil
    platform pipes popen2 poplib posix posixpath profile pstats pty py_compile pydoc pyclbr readline requests rlcompleter
    runpy sched select selectors setuptools shelve shutil shlex site smtpd smtplib socket socketserver sqlite3 ssl
    sys sysconfig syslog tarfile telnetlib tempfile test threading timeit tkinter trace tracemalloc turtle types.CodeType
    unittest urllib urllib2 urllib3 venv virtualenv webbrowser winreg wsgiref xmlrpc xml zipapp zipfile zipimport zmq
    """.split()
)

# Single names elsewhere, by module.
_NAMES: Final = {
    "builtins": frozenset(
        """
        __build_class__ __import__ apply breakpoint callable compile copyright delattr dir eval exec execfile exit
        file filter globals hasattr help input intern iter locals map memoryview next open print quit raw_input
        reduce reload setattr super type vars
        """.split()
    ),
    "torch": frozenset("load save compile".split()),
    "torch.serialization": frozenset("load save _load _legacy_load _save".split()),
    "torch._utils_internal": frozenset("*"),
    "torch.package": frozenset("*"),
    "torch.jit": frozenset("load compile CompilationUnit script trace".split()),
    "torch._inductor.codecache": frozenset("*"),
    "torch._dynamo.guards": frozenset("*"),
    "torch._C": frozenset("*"),
    "torch.hub": frozenset("*"),
    "torch.utils.cpp_extension": frozenset("*"),
    "torch.utils.collect_env": frozenset("*"),
    "torch.utils.model_zoo": frozenset("*"),
    "torch.utils._config_module": frozenset("*"),
    "torch.fx.experimental.symbolic_shapes": frozenset(["ShapeEnv.evaluate_guards_expression"]),
    "torch.distributed": frozenset("run launch rpc".split()),
    "torch.distributed.run": frozenset("*"),
    "torch.distributed.launch": frozenset("*"),
    "torch.distributed.rpc": frozenset("*"),
    "numpy": frozenset("load save fromfile memmap loadtxt genfromtxt savetxt".split()),
    "numpy.f2py": frozenset("*"),
    "numpy.testing": frozenset("*"),
    "numpy.distutils": frozenset("*"),
    "numpy.core._multiarray_umath": frozenset("fromfile frompyfunc".split()),
    "functools": frozenset(["reduce"]),
    "operator": frozenset("attrgetter methodcaller call itemgetter".split()),
    "_operator": frozenset("attrgetter methodcaller call itemgetter".split()),
    "types": frozenset("CodeType FunctionType LambdaType MethodType ModuleType DynamicClassAttribute".split()),
    "new": frozenset("code function instancemethod module".split()),
    "copyreg": frozenset("add_extension constructor pickle remove_extension".split()),
    "_pickle": frozenset("*"),
    "_codecs": frozenset("decode register lookup".split()),
    "codecs": frozenset("open decode register lookup".split()),
    "logging.config": frozenset("*"),
    "pandas": frozenset("eval read_pickle".split()),
    "transformers.dynamic_module_utils": frozenset("*"),
    "signal": frozenset("signal raise_signal pthread_kill alarm setitimer default_int_handler".split()),
}

# Plain records of the operating system that some programs keep in their settings.
_HARMLESS: Final = frozenset(
    """
    os.stat_result posix.stat_result os.terminal_size os.times_result posix.times_result posix.uname_result
    platform.uname_result io.BytesIO io.StringIO _io.BytesIO _io.StringIO inspect._ParameterKind tempfile._Default
    asyncio.Lock urllib.parse.ParseResult urllib.parse.SplitResult sys.flags sys.version_info
    xml.etree.ElementTree.Element ast.literal_eval multiprocessing.context.AuthenticationString
    """.split()
) - {"ast.literal_eval", "multiprocessing.context.AuthenticationString"}

# Names under which Python 2 wrote the same modules.
_OLD_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg", "__builtins__": "builtins"}

# Callables that call what they are given: harmless around a harmless class, not around a dangerous one.
CALLERS: Final = frozenset(
    "functools.partial functools.partialmethod functools.reduce builtins.getattr itertools.starmap itertools.accumulate".split()
)


def modern_module(module: str) -> str:
    """The Python 3 name of a module that a protocol-2 pickle calls by its Python 2 name."""
    return _OLD_MODULES.get(module, module)


def is_dangerous(module: str, qualname: str) -> bool:
    """Whether calling `module.qualname` would run code, or touch files, processes or the network."""
    module = modern_module(module)
    # `os` of some other module (`shutil.os.system`, `a.b` + `c.os.system`) is still `os`.
    parts = qualname.split(".")
    if f"{module}.{qualname}" in _HARMLESS:
        return False
    if module in _MODULES or module.split(".", 1)[0] in _MODULES:
        return True
    names = _NAMES.get(module)
    if names is not None and ("*" in names or parts[0] in names or qualname in names):
        return True
    if len(parts) > 1 and (any(part in _MODULES for part in parts[:-1]) or _has_dunder(parts)):
        return True
    return any(module.startswith(outer + ".") and "*" in inner for outer, inner in _NAMES.items())


def _has_dunder(parts: list[str]) -> bool:
    """A path through `__globals__`, `__class__` and the like; no honest qualname has one before or at its end."""
    return any(part.startswith("__") and part.endswith("__") for part in parts)


def suspicious(names: Iterable[str]) -> list[str]:
    """Those of the `module.qualname` paths met in a pickle that would be dangerous to call, sorted."""
    return sorted(name for name in set(names) if is_dangerous(*_split(name)))


def _split(path: str) -> tuple[str, str]:
    """Module and qualname of a dotted path whose boundary is not known: the longest module that is known wins."""
    head, _, tail = path.rpartition(".")
    return head, tail
