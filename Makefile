# make run: a first comparison; make test: the test suite; make docs: the tables of the pages; make bench: kernel timings, of all sizes;
# of some: make bench SIZES=1e4,1e6 TIMINGS=some.json; make gpu: what the CUDA kernels do on a GPU. Each makes what
# it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint docs bench gpu mutants sanitize mutation clean

run: $(VENV)/installed
	$(BIN)/gcbench run --task digits --compressor none,terngrad --seed 0,1,2
	$(BIN)/gcbench compare

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=results/papers $(BIN)/mypy results/papers/*.py results/findings.py results/speeds.py

# The tables of the pages, generated again from the committed rows.
docs: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python -m pages

SIZES ?= 1e4,1e6,resnet50,25e6
TIMINGS ?= results/kernels.json
bench: $(VENV)/installed-dev
	mkdir -p build
	$(BIN)/python -m pytest tests/benchmarks --quiet --benchmark-quiet --sizes $(SIZES) \
	  --benchmark-json build/kernels.json
	$(BIN)/gcbench kernels build/kernels.json --json > $(TIMINGS)
	$(BIN)/gcbench kernels $(TIMINGS)

# The CUDA kernels on this machine's GPU: their bytes, their speed beside torch, one training. Writes
# $(OUT)/gpu.json and gpu.md in under 8 minutes; exits with an error, and one line, where there is no GPU.
OUT ?= build
gpu: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python -m benchmarks.gpu --out $(OUT)

# Faults derived from every file of compressors/: does `gcbench verify` refuse them? Continues an earlier run.
SHARE ?= 1
mutants: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m gcbench.checks.mutants --share $(SHARE)

# The kernels' tests with every access to memory checked; the libraries are built anew before and after.
sanitize: $(VENV)/installed-dev
	$(BIN)/python hatch_build.py -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest tests/ops/test_kernels.py tests/ops/test_means.py tests/ops/test_dispatch.py tests/ops/test_bitstream.py \
	  tests/core/test_contract.py \
	  -k "definition or buffer or corrupt or every_backend or means or dispatch or bitstream or large_outputs"; \
	status=$$?; $(BIN)/python hatch_build.py && exit $$status

# Changes modules line by line, and lists the changes that the tests do not notice; minutes. For example:
# make mutation MODULES="gcbench/core/claims.py gcbench/core/task.py" TESTS=tests/core
MODULES ?= gcbench/stats/seeds.py
TESTS ?= tests/stats/test_seeds.py
mutation: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "mutmut>=3.8"
	rm -rf build/mutation && mkdir -p build/mutation
	git ls-files -z --cached --others --exclude-standard | xargs -0 ls -d 2> /dev/null | xargs cp --parents -t build/mutation
	cp -r gcbench/_native build/mutation/gcbench/
	{ echo "[mutmut]"; echo "source_paths = gcbench"; echo "process_isolation = forkserver"; \
	  echo "only_mutate ="; printf "  %s\n" $(MODULES); \
	  echo "pytest_add_cli_args_test_selection ="; printf "  %s\n" $(TESTS); \
	  echo "also_copy ="; printf "  %s\n" compressors tasks cuda results README.md CONTRIBUTING.md hatch_build.py; \
	} > build/mutation/setup.cfg
	cd build/mutation && $(CURDIR)/$(BIN)/mutmut run --max-children 2 && $(CURDIR)/$(BIN)/mutmut results

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(wildcard cuda/*.cpp cuda/*.hpp cuda/*.cuh)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*(r.replace(" ", "") for r in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]))')
	touch $@
