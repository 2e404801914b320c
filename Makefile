# jetlag. `make help` lists the targets and variables.

BACKEND ?= cpu
CXX ?= g++
SAN ?=
DEBUG ?=
PRECISION ?= fp32

# Each variant has its own folder, so that objects of different flags never mix.
comma := ,
VARIANT := $(BACKEND)$(addprefix -,$(filter bf16 tf32,$(PRECISION)))$(if $(DEBUG),-debug)$(if $(SAN),-$(subst $(comma),-,$(SAN)))
BUILD ?= build/$(VARIANT)

ifneq ($(words $(BACKEND))-$(filter-out cpu cuda emu,$(BACKEND)),1-)
$(error BACKEND=$(BACKEND): there are cpu, cuda and emu)
endif
ifneq ($(words $(PRECISION))-$(filter-out fp32 tf32 bf16,$(PRECISION)),1-)
$(error PRECISION=$(PRECISION): there are fp32, tf32 and bf16)
endif
ifeq ($(BACKEND)$(filter fp32,$(PRECISION)),cpu)
$(error PRECISION=$(PRECISION): the CPU's ops are float32 only; BACKEND=cuda and BACKEND=emu have $(PRECISION))
endif
ifneq ($(and $(filter emu,$(BACKEND)),$(findstring thread,$(SAN))),)
$(error BACKEND=emu with SAN=$(SAN): ThreadSanitizer cannot follow the emulator's fibers)
endif

# ThreadSanitizer does not understand GCC's OpenMP runtime; it understands clang's.
ifneq ($(findstring thread,$(SAN)),)
ifeq ($(origin CXX),default)
CXX := clang++
else ifeq ($(origin CXX),file)
CXX := clang++
endif
endif

# -ffp-contract=off: whether a*b+c rounds once or twice is written in the source (MulAdd), not left to the compiler.
OPENMP := -fopenmp
CXXFLAGS := -std=c++20 -Wall -Wextra -Werror $(if $(DEBUG)$(SAN),-g) $(OPENMP) -ffp-contract=off -pthread
# -MD, not -MMD: Highway's foreach_target.h includes the kernels again, and what a system header includes counts as one.
# Arm's scalable vectors have no size at compile time, and the kernels keep vectors in arrays: NEON serves every Arm.
CPPFLAGS := -I. -MD -MP -DFMT_SHARED $(if $(filter bf16,$(PRECISION)),-DJETLAG_BF16 )$(if $(filter tf32,$(PRECISION)),-DJETLAG_TF32 )-DHWY_DISABLED_TARGETS=HWY_SVE+HWY_SVE2+HWY_SVE_256+HWY_SVE2_128
LDFLAGS := $(OPENMP) -pthread
LDLIBS := -lhwy -lyaml-cpp -lcurl -lcrypto -larchive -lcsv -lfmt
# Time is spent in the kernels, whose micro-loops want to be unrolled, in the laboratory, and in the tests' reference. The
# rest only calls them, and compiles twice as fast at -O1.
HOST_OPTIMIZATION := $(if $(DEBUG),-O0,-O1)
REFERENCE_OPTIMIZATION := $(if $(DEBUG),-O0,-O2)
KERNEL_OPTIMIZATION := $(if $(DEBUG),-O0,-O3)
ifneq ($(SAN),)
CXXFLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined)
LDFLAGS += -fsanitize=$(SAN)
endif

# The sources in kernels/cuda/: for GPUs with nvcc, for the emulator with the C++ compiler.
CUDA_HOME ?= /usr/local/cuda
NVCC ?= $(CUDA_HOME)/bin/nvcc
ifeq ($(BACKEND),cuda)
ifeq ($(shell command -v $(NVCC)),)
$(error BACKEND=cuda: no $(NVCC): install the CUDA Toolkit, or say where it is with CUDA_HOME)
endif
# Machine code for each architecture of CUDA_ARCH, and PTX of the last for what comes later. (100 and 120 came with 12.8.)
KNOWN_ARCH := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_ARCH ?= $(filter $(KNOWN_ARCH),80 86 89 90 100 120)
ifneq ($(if $(strip $(CUDA_ARCH)),$(filter-out $(KNOWN_ARCH) native,$(CUDA_ARCH)),none),)
$(error CUDA_ARCH=$(CUDA_ARCH): $(NVCC) knows $(KNOWN_ARCH), and native)
endif
GENCODE := $(if $(filter native,$(CUDA_ARCH)),-arch=native,$(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
	-gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH)))
CUFLAGS = -std=c++20 -ccbin $(CXX) $(GENCODE) -fmad=false -lineinfo $(if $(DEBUG),-O0 -g,-O3) -Werror all-warnings \
	-Xcompiler "$(filter-out -std=%,$(CXXFLAGS))"
COMPILE_CU = $(NVCC) $(CPPFLAGS) $(CUFLAGS) -c
CPPFLAGS += -isystem $(CUDA_HOME)/include
LDLIBS += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcudart
# cuDNN's attention, of bf16 only, if a program links with it.
ifeq ($(PRECISION)-$(origin CUDNN),bf16-undefined)
CUDNN := $(shell printf '\043include <cudnn.h>\nstatic_assert(CUDNN_VERSION >= 91600);\nint main() { return cudnnGetVersion() == 0; }\n' | \
	$(CXX) -isystem $(CUDA_HOME)/include -x c++ - -L$(CUDA_HOME)/lib64 -lcudnn -o /dev/null 2>/dev/null && echo yes)
endif
ifeq ($(PRECISION)-$(CUDNN),bf16-yes)
CPPFLAGS += -DJETLAG_CUDNN
LDLIBS += -lcudnn
endif
endif
ifeq ($(BACKEND),emu)
# It runs where it was built, and its fmaf is a function call without the instruction.
CPU_FLAGS := $(shell grep -m1 ^flags /proc/cpuinfo 2>/dev/null)
EMU_SIMD ?= $(if $(and $(filter avx2,$(CPU_FLAGS)),$(filter fma,$(CPU_FLAGS))),-mavx2 -mfma)
COMPILE_CU = $(CXX) $(CPPFLAGS) $(CXXFLAGS) $(KERNEL_OPTIMIZATION) $(EMU_SIMD) -x c++ -c
LDLIBS += -lboost_context
endif

# One program per source file in these folders, named after the file; everything else is the library.
PROGRAM_SOURCES := $(wildcard data_prep/*.cpp train/*.cpp eval/*.cpp generate/*.cpp bench/*.cpp lab/*.cpp bridge/*.cpp)
MAIN_SOURCES := $(shell grep -l '^int main(.*)' $(PROGRAM_SOURCES) /dev/null 2>/dev/null)
LIBRARY_SOURCES := $(wildcard src/*.cpp kernels/*.cpp kernels/position/*.cpp kernels/$(BACKEND)/*.cpp models/*.cpp) \
	$(filter-out $(MAIN_SOURCES),$(PROGRAM_SOURCES))
TEST_SOURCES := $(wildcard test/*.cpp test/reference/*.cpp)
ifneq ($(BACKEND),cpu)
LIBRARY_SOURCES += $(wildcard kernels/cuda/*.cu)
LIBRARY_SOURCES := $(if $(findstring -DJETLAG_CUDNN,$(CPPFLAGS)),$(LIBRARY_SOURCES),$(filter-out %/attention_cudnn.cpp,$(LIBRARY_SOURCES)))
TEST_SOURCES += $(wildcard test/device/*.cpp test/device/*.cu)
endif
ifeq ($(BACKEND),emu)
# Dense products are the CPU's own.
LIBRARY_SOURCES += $(wildcard kernels/cpu/dense.cpp)
TEST_SOURCES += $(wildcard test/emu/*.cpp test/emu/*.cu)
endif

PROGRAMS := $(patsubst %.cpp,$(BUILD)/%,$(notdir $(MAIN_SOURCES)))
LIBRARY := $(BUILD)/libjetlag.a
TESTS := $(BUILD)/tests
# libFuzzer programs: fuzz_NAME from test/fuzz/NAME.cpp.
FUZZ_SOURCES := $(wildcard test/fuzz/*.cpp)
FUZZERS := $(patsubst test/fuzz/%.cpp,$(BUILD)/fuzz_%,$(FUZZ_SOURCES))
# a.cpp -> a.o, a.cu -> a.cu.o
objects_of = $(patsubst %.cpp,$(BUILD)/obj/%.o,$(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(1)))
OBJECTS := $(call objects_of,$(LIBRARY_SOURCES) $(MAIN_SOURCES) $(TEST_SOURCES) $(FUZZ_SOURCES))

# In parallel even when nobody asks: as many jobs as cores.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc)
endif

.PHONY: all programs test fuzz fuzzers format check-format clean help FORCE
.DEFAULT_GOAL := all
.SECONDARY: $(call objects_of,$(FUZZ_SOURCES))

all: programs $(TESTS) $(if $(filter cuda,$(BACKEND)),$(BUILD)/kernels.txt)
programs: $(PROGRAMS)

# What made the objects. Another compiler or other flags in the same folder rebuild everything.
COMMANDS := $(CXX) $(CPPFLAGS) $(CXXFLAGS) $(HOST_OPTIMIZATION) $(REFERENCE_OPTIMIZATION) $(KERNEL_OPTIMIZATION) $(LDFLAGS) $(LDLIBS) \
	$(COMPILE_CU)
$(BUILD)/commands: FORCE
	@mkdir -p $(BUILD)
	@echo '$(COMMANDS)' | cmp -s - $@ || echo '$(COMMANDS)' >$@
FORCE:

OPTIMIZATION := $(HOST_OPTIMIZATION)
$(BUILD)/obj/kernels/%.o: OPTIMIZATION := $(KERNEL_OPTIMIZATION)
$(BUILD)/obj/kernels/emu/%.o: OPTIMIZATION := $(KERNEL_OPTIMIZATION) $(EMU_SIMD)
$(BUILD)/obj/lab/%.o: OPTIMIZATION := $(REFERENCE_OPTIMIZATION)
$(BUILD)/obj/test/reference/%.o: OPTIMIZATION := $(REFERENCE_OPTIMIZATION)

$(BUILD)/obj/%.o: %.cpp $(BUILD)/commands
	@mkdir -p $(dir $@)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) $(OPTIMIZATION) -c $< -o $@

$(BUILD)/obj/%.cu.o: %.cu $(BUILD)/commands
	@mkdir -p $(dir $@)
	$(COMPILE_CU) $< -o $@

# nvcc tells what each kernel takes (%.ptxas) and leaves the PTX (%.ptx/) for kernels.txt.
ifeq ($(BACKEND),cuda)
$(BUILD)/obj/kernels/cuda/%.cu.o: kernels/cuda/%.cu $(BUILD)/commands
	@rm -rf $(@:.o=.ptx)
	@mkdir -p $(@:.o=.ptx)
	$(COMPILE_CU) -Xptxas -v --keep --keep-dir $(@:.o=.ptx) $< -o $@ 2>$(@:.o=.ptxas) || { cat $(@:.o=.ptxas) >&2; exit 1; }
	@find $(@:.o=.ptx) -type f ! -name '*.ptx' -delete
endif

$(LIBRARY): $(call objects_of,$(LIBRARY_SOURCES))
	@rm -f $@
	ar rcs $@ $^

# Registers, shared memory and spills of each kernel.
KERNEL_OBJECTS := $(call objects_of,$(filter kernels/%.cu,$(LIBRARY_SOURCES)))
$(BUILD)/kernels.txt: $(KERNEL_OBJECTS) scripts/kernel_report
	scripts/kernel_report $(KERNEL_OBJECTS:.o=) >$@.part
	@mv $@.part $@

define program_rule
$(BUILD)/$(notdir $(1:.cpp=)): $(BUILD)/obj/$(1:.cpp=.o) $(LIBRARY)
	$$(CXX) $$(LDFLAGS) $$^ $$(LDLIBS) -o $$@
endef
$(foreach source,$(MAIN_SOURCES),$(eval $(call program_rule,$(source))))

# The laboratory repeats diagnostics that PyTorch computed in float, with the sines and cosines that PyTorch uses.
$(BUILD)/lab $(BUILD)/train_retrieval $(TESTS): LDLIBS += -lsleef

$(TESTS): $(call objects_of,$(TEST_SOURCES)) $(LIBRARY)
	$(CXX) $(LDFLAGS) $^ -lgtest $(LDLIBS) -o $@

# What the fuzzers reach needs no threads, and few of the sources.
fuzz:
	@$(MAKE) --no-print-directory fuzzers BUILD=build/fuzz CXX=clang++ SAN=fuzzer-no-link,address,undefined OPENMP=
fuzzers: $(FUZZERS)
$(BUILD)/fuzz_%: $(patsubst %.cpp,$(BUILD)/obj/%.o,test/fuzz/%.cpp test/fuzz_targets.cpp src/midi.cpp src/error.cpp src/command_line.cpp \
		src/files.cpp src/manifest.cpp data_prep/midi_tokens.cpp)
	$(CXX) $(LDFLAGS) -fsanitize=fuzzer $^ -lfmt -lcrypto -o $@

# The libraries are not compiled with ThreadSanitizer, which therefore cannot see their locks.
test: all
	JETLAG_BUILD=$(BUILD) $(if $(findstring thread,$(SAN)),TSAN_OPTIONS=ignore_noninstrumented_modules=1) $(TESTS) $(if $(FILTER),--gtest_filter='$(FILTER)')

FORMATTED := $(shell find src kernels models train eval generate data_prep bench lab bridge test -name '*.cpp' -o -name '*.h' -o -name '*.cu' 2>/dev/null)
CLANG_FORMAT ?= clang-format
format:
	$(CLANG_FORMAT) -i $(FORMATTED)
check-format:
	$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED)

clean:
	rm -rf $(BUILD)

help:
	@echo 'make               build every program and the tests into build/cpu/'
	@echo 'make test          build and run the tests (FILTER=Attention.* for some of them)'
	@echo 'make fuzz          build the libFuzzer programs into build/fuzz/ (needs the packages clang and libclang-rt-14-dev)'
	@echo 'make format        rewrite the sources with clang-format; make check-format only checks'
	@echo 'make clean         remove the build folder of the variant at hand'
	@echo
	@echo 'DEBUG=1                 no optimisation, into build/cpu-debug/'
	@echo 'SAN=address,undefined   sanitizers, into build/cpu-address-undefined/'
	@echo 'SAN=thread              ThreadSanitizer, into build/cpu-thread/ (needs the packages clang and libomp-dev)'
	@echo 'CXX=..., BUILD=...      another compiler, another build folder (cross-compiling)'
	@echo 'BACKEND=cpu             the set of ops to link:'
	@echo '       =cuda            for NVIDIA GPUs, into build/cuda/ (needs the CUDA Toolkit 12 or later in CUDA_HOME)'
	@echo '       =emu             the same kernels run on the CPU, into build/emu/ (needs the package libboost-context-dev)'
	@echo 'PRECISION=bf16          activations and matrix products in bf16 (cuda, emu), into build/cuda-bf16/, build/emu-bf16/'
	@echo '         =tf32          float32 with matrix products in tf32 (cuda, emu), into build/cuda-tf32/, build/emu-tf32/'
	@echo 'CUDNN=no                without cuDNN (cuda, bf16; default: with it if it is 9.16 or later)'
	@echo 'CUDA_ARCH="90 120"      the GPU architectures to compile for; native: the one at hand'

-include $(OBJECTS:.o=.d)
