#include "kernels/emu/runtime.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

using Clock = std::chrono::steady_clock;

struct CUevent_st {
    Clock::time_point time;
};
struct CUgraph_st {
    std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
    std::vector<std::function<void()>> work;
};
struct CUstream_st {
    CUgraph_st* graph;  // in which it is captured
};

// How many streams are captured, and whether something was done meanwhile that must not be.
static int captures = 0;
static bool invalidated = false;

// For what a capture does not allow.
static cudaError_t unless_capturing() {
    if (captures == 0) return cudaSuccess;
    invalidated = true;
    return cudaErrorStreamCaptureUnsupported;
}

// ---------------------------------------------------------------------------------------------------------------
// With JETLAG_EMU_GUARD=1 device memory comes from one range of addresses that is accessible only while the device
// works. A host that reads or writes it itself, which a GPU's memory does not allow, ends with exit code 70. It costs
// two system calls for each kernel.

static constexpr size_t kGuardedBytes = size_t{1} << 36;  // of addresses

struct GuardedMemory {
    std::byte* base = nullptr;        // nullptr: not guarded
    size_t used = 0;                  // of the addresses
    std::map<size_t, size_t> blocks;  // offset of each allocation, and its bytes
    std::map<size_t, size_t> freed;
};

static size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

static bool is_guarded(const GuardedMemory& guarded, const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p), base = reinterpret_cast<uintptr_t>(guarded.base);
    return guarded.base != nullptr && address >= base && address < base + kGuardedBytes;
}

static GuardedMemory& guarded_memory();
static struct sigaction action_before;

static void on_segmentation_fault(int, siginfo_t* info, void*) {
    if (!is_guarded(guarded_memory(), info->si_addr)) {
        sigaction(SIGSEGV, &action_before, nullptr);  // happens again, and is handled as before
        return;
    }
    static constexpr char kMessage[] = "emulator: error: the host itself accesses device memory\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    _exit(70);
}

static GuardedMemory& guarded_memory() {
    static GuardedMemory* const memory = [] {
        GuardedMemory* made = new GuardedMemory;  // stays: memory is freed at the very end of a program too
        const char* wanted = std::getenv("JETLAG_EMU_GUARD");
        if (wanted == nullptr || std::strcmp(wanted, "1") != 0) return made;
        void* base = mmap(nullptr, kGuardedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) return made;
        made->base = static_cast<std::byte*>(base);
        struct sigaction action = {};
        action.sa_sigaction = on_segmentation_fault;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, &action_before);
        return made;
    }();
    return *memory;
}

// Lets the device at its memory until the end of the scope.
struct DeviceWorks {
    GuardedMemory& guarded = guarded_memory();
    DeviceWorks() {
        if (guarded.used > 0) mprotect(guarded.base, guarded.used, PROT_READ | PROT_WRITE);
    }
    ~DeviceWorks() {
        if (guarded.used > 0) mprotect(guarded.base, guarded.used, PROT_NONE);
    }
    DeviceWorks(const DeviceWorks&) = delete;
};

// First fit among what was freed, else at the end. What is freed gives its pages back.
static void* guarded_alloc(GuardedMemory& guarded, size_t bytes) {
    bytes = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    size_t offset = guarded.used;
    for (auto it = guarded.freed.begin(); it != guarded.freed.end(); ++it)
        if (it->second >= bytes) {
            offset = it->first;
            if (it->second > bytes) guarded.freed[offset + bytes] = it->second - bytes;
            guarded.freed.erase(offset);
            break;
        }
    if (offset == guarded.used) {
        if (bytes > kGuardedBytes - guarded.used) return nullptr;
        guarded.used += bytes;
    }
    guarded.blocks[offset] = bytes;
    return guarded.base + offset;
}

static void guarded_free(GuardedMemory& guarded, void* memory) {
    const size_t offset = static_cast<size_t>(static_cast<std::byte*>(memory) - guarded.base);
    auto node = guarded.blocks.extract(offset);
    madvise(memory, node.mapped(), MADV_DONTNEED);
    const auto at = guarded.freed.insert(std::move(node)).position;
    if (const auto next = std::next(at); next != guarded.freed.end() && at->first + at->second == next->first) {
        at->second += next->second;
        guarded.freed.erase(next);
    }
    if (at == guarded.freed.begin()) return;
    if (const auto before = std::prev(at); before->first + before->second == at->first) {
        before->second += at->second;
        guarded.freed.erase(at);
    }
}

// ---------------------------------------------------------------------------------------------------------------

void jetlag::emu::submit(cudaStream_t stream, std::function<void()> work) {
    if (stream != nullptr && stream->graph != nullptr) {
        stream->graph->work.push_back(std::move(work));
    } else {
        const DeviceWorks works;
        work();
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
    }
    return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new CUstream_st{nullptr};
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return unless_capturing();
}

// Aligned as CUDA aligns.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    *memory = nullptr;
    if (const cudaError_t error = unless_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    GuardedMemory& guarded = guarded_memory();
    if (guarded.base != nullptr) *memory = guarded_alloc(guarded, bytes);
    if (guarded.base != nullptr ? *memory == nullptr : posix_memalign(memory, 256, bytes) != 0)
        return cudaErrorMemoryAllocation;
    const DeviceWorks works;
    std::memset(*memory, 0xff, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    if (const cudaError_t error = unless_capturing(); error != cudaSuccess) return error;
    if (GuardedMemory& guarded = guarded_memory(); is_guarded(guarded, memory)) {
        guarded_free(guarded, memory);
    } else {
        std::free(memory);
    }
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    jetlag::emu::submit(stream, [=] { std::memset(memory, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const GuardedMemory& guarded = guarded_memory();
    if (guarded.base != nullptr && (is_guarded(guarded, to) != (kind != cudaMemcpyDeviceToHost) ||
                                    is_guarded(guarded, from) != (kind != cudaMemcpyHostToDevice)))
        return cudaErrorInvalidValue;
    jetlag::emu::submit(stream, [=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st{};
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    jetlag::emu::submit(stream, [=] { event->time = Clock::now(); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return unless_capturing();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream == nullptr || stream->graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    stream->graph = new CUgraph_st;
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (stream == nullptr || stream->graph == nullptr) return cudaErrorInvalidValue;
    *graph = std::exchange(stream->graph, nullptr);
    captures--;
    if (!std::exchange(invalidated, false)) return cudaSuccess;
    delete std::exchange(*graph, nullptr);
    return cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
    *runnable = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
    if (stream != nullptr && stream->graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    const DeviceWorks works;
    for (const std::function<void()>& work : runnable->work) work();
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
    delete runnable;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {.name = "emulated", .major = 8, .minor = 0, .multiProcessorCount = 2};
    return cudaSuccess;
}
