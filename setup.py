"""Sluice as a package: `pip install .`, `pip install -e .` and a bare checkout all run."""

import re
import runpy
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
CPU_OPS = runpy.run_path(str(ROOT / "engine" / "cpu_ops" / "build.py"))
VERSION = re.search(r'VERSION = "(.+)"', (ROOT / "engine" / "version.py").read_text())[1]

# Torch's range admits the CPU builds of 2.13 and the CUDA builds that GPU machines have.
ENGINE = [
    "torch>=2.11,<3",
    "numpy>=2,<3",
    "safetensors>=0.5,<1",
    "gguf>=0.17,<1",
    "huggingface_hub>=1,<3",
    "tqdm>=4.66,<5",
]
SERVER = [
    "uvloop>=0.21,<1",
    "h11>=0.16,<1",
    "h2>=4.4,<5",
    "wsproto>=1.2,<2",
    "msgspec>=0.19,<1",
    "llguidance>=1.9,<2",
    "tokenizers>=0.21,<1",
    "jinja2>=3.1.6,<4",
    "prometheus-client>=0.21,<1",
]
# The wheel of CUDA's runtime holds cuda_fp16.h and cuda_bf16.h, which kernels include.
CUDA = ["cupy-cuda12x>=14,<15", "nvidia-cuda-nvrtc-cu12>=12.8,<13", "nvidia-cuda-runtime-cu12>=12.8,<13"]
# Traces; the engine has none of it.
OTEL = ["opentelemetry-sdk>=1.34,<2", "opentelemetry-exporter-otlp-proto-http>=1.34,<2"]
BENCH = ["matplotlib>=3.10,<4"]
TEST = [
    *BENCH,
    *OTEL,
    "setuptools>=77,<90",
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.120,<7",
    "transformers>=5,<6",
    "openai>=2,<4",
    "anthropic>=2,<3",
    "jsonschema>=4.23,<5",
    "pyyaml>=6,<7",
    "langchain-openai>=1,<2",
    "httpx[http2]>=0.28,<1",
    "httpx-sse>=0.4,<1",
    "sseclient-py>=1.8,<2",
    "playwright>=1.50,<2",
    'atheris>=3,<4; sys_platform == "linux"',
    # NVIDIA's compiler and headers, of the CUDA version that CuPy is built for; they need no driver.
    'nvidia-cuda-nvrtc-cu12>=12.9,<12.10; sys_platform == "linux"',
    'nvidia-cuda-runtime-cu12>=12.9,<12.10; sys_platform == "linux"',
    "websockets>=15,<18",
    "ruff>=0.15,<1",
    "mypy>=1.18,<3",
]


PAGE = ["*.html", "*.css", "*.js", "*.svg"]  # the playground


CPU_OPERATORS = Extension("engine.cpu_ops.library", sources=[], optional=True)
# Without it a token goes the way that Python has for it.
OUTLET = Extension(
    "server._outlet",
    sources=["server/outlet.c"],
    extra_compile_args=["-O2", "-Wno-missing-field-initializers"],
    py_limited_api=True,
    optional=True,
)


class BuildExtensions(build_ext):
    """The CPU operators are a plain shared library, by the same commands that a checkout uses at its first start."""

    def get_ext_filename(self, fullname):
        if fullname.rpartition(".")[2] != CPU_OPERATORS.name.rpartition(".")[2]:  # asked with and without folders
            return super().get_ext_filename(fullname)
        return str(Path(*fullname.split(".")).with_name(CPU_OPS["file_name"]()))

    def build_extension(self, ext):
        if ext is not CPU_OPERATORS:
            super().build_extension(ext)
            return
        try:
            CPU_OPS["build"](Path(self.get_ext_fullpath(ext.name)))
        except CPU_OPS["BuildError"] as error:  # a warning: without the library the engine computes in torch
            raise CompileError(str(error)) from None


setup(
    name="sluice",
    version=VERSION,
    description="Streams the tokens of a language model to clients the moment they exist: SSE, chunked HTTP, WebSocket",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["server*", "protocols*", "engine*"]), "engine._kernels"],
    # CUDA sources live in cuda/, which must never be a Python package: NVIDIA's own namespace package has that name.
    package_dir={"engine._kernels": "cuda"},
    package_data={"engine._kernels": ["*.cu", "*.cuh"], "engine.cpu_ops": ["*.cpp", "*.h"], "server.playground": PAGE},
    ext_modules=[CPU_OPERATORS, *([OUTLET] if sys.platform == "linux" else [])],
    cmdclass={"build_ext": BuildExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # nothing compiled depends on Python's version
    install_requires=[*SERVER, *ENGINE],
    extras_require={"test": TEST, "bench": BENCH, "cuda": CUDA, "otel": OTEL},
    entry_points={"console_scripts": ["sluice = server.__main__:main"]},
)
