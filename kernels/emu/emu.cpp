// Runs the threads of blocks as fibers; see emu.h.

#include <fmt/format.h>
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

constinit thread_local uint3 threadIdx{}, blockIdx{};
constinit thread_local dim3 blockDim, gridDim;

namespace jetlag::emu {
namespace {

namespace context = boost::context::detail;

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
// A block's shared memory where compute capability is 8.6 or 12.0, the least of what we build for.
constexpr size_t kMaxStaticShared = 48 * 1024, kMaxShared = 99 * 1024;

struct Stack {
    std::byte* bottom;
    size_t bytes;
};

// A copy under way.
struct Copy {
    std::byte* to;
    const std::byte* from;
    int bytes;
    int group;
};

// A thread of the running block. There may be many, and a switch touches two: they fit in a cache line each.
struct alignas(64) Fiber {
    context::fcontext_t context;  // nullptr: it has not started
    uint3 index;
    int number;                // in the block
    int stack;                 // in stacks
    WarpOperation* operation;  // where it waits, if it does that in a warp operation
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack;
#endif
};

// The lanes of a warp, by what they do; those in none of the sets run, or can.
struct WarpState {
    uint32_t at_barrier, ended;
    uint32_t waiting;  // in a warp operation
    uint32_t wanted;   // that those wait for
};

// The asynchronous copies of a thread.
struct Copies {
    std::vector<Copy> under_way;
    int groups = 0;  // committed
};

struct SharedArray {
    const void* key;
    const char* name;
    std::byte* data;
    size_t bytes;
};

// What all blocks of a launch have in common.
struct Launch {
    const char* text;
    dim3 grid, block;
    size_t shared_bytes;
    void (*body)(const void*);
    const void* arguments;
    uint64_t seed;
    int threads;
};

uint64_t mix(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// One operating-system thread's means of running a block, kept from block to block.
struct Machine {
    const Launch* launch = nullptr;
    Fiber* current = nullptr;
    Fiber main{};  // what runs the block
    Stack main_stack{};
    Fiber gone{};  // takes the place of a thread that has ended
    std::unique_ptr<Fiber[]> fibers{new Fiber[kMaxThreads]()};
    WarpState warps[kMaxThreads / kLanes];
    dim3 shape{0};  // for which the fibers' indices are

    uint16_t runnable[kMaxThreads];
    int runnable_count = 0;
    int at_barrier = 0, ended = 0;
    Site barrier_site{};
    uint64_t random = 0;

    // Stacks are made when first needed. A kernel whose threads never wait needs one for all of them.
    std::vector<Stack> stacks;
    std::vector<int> free_stacks;
    std::byte* stack_memory = nullptr;

    // Arrays in shared memory, one after the other, with red zones before, between and after.
    std::byte* shared = nullptr;
    size_t shared_used = 0, static_shared = 0;
    std::vector<SharedArray> arrays;
    std::vector<Copies> copies{kMaxThreads};

    Machine();
    ~Machine();
};

// Stacks are not a multiple of a large power of two apart, or their tops would all share a few sets of the caches.
constexpr size_t kPage = 4096;
constexpr size_t kStackStride = kStackBytes + 2 * kPage;
constexpr size_t kStackArea = kStackStride * kMaxThreads;
constexpr size_t kRedZone = 128;
constexpr size_t kSharedArea = kMaxShared + 256 * kRedZone;
constexpr int kPoison = 0xff;  // NaN as float, double and bf16

Machine::Machine() {
    void* area = mmap(nullptr, kStackArea, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) throw std::bad_alloc();
    stack_memory = static_cast<std::byte*>(area);
    shared = static_cast<std::byte*>(std::aligned_alloc(kRedZone, kSharedArea));
    if (shared == nullptr) throw std::bad_alloc();
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(shared, kSharedArea);
#endif
}

Machine::~Machine() {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(shared, kSharedArea);
    ASAN_UNPOISON_MEMORY_REGION(stack_memory, kStackArea);
#endif
    std::free(shared);
    munmap(stack_memory, kStackArea);
}

thread_local Machine* machine_of_thread = nullptr;

Machine& machine() {
    return *machine_of_thread;
}

Machine& make_machine() {
    static thread_local std::unique_ptr<Machine> owner;
    if (owner == nullptr) owner = std::make_unique<Machine>();
    machine_of_thread = owner.get();
    return *owner;
}

// ---------------------------------------------------------------------------------------------------------------
// Errors

std::string describe(const uint3& index) {
    return fmt::format("({},{},{})", index.x, index.y, index.z);
}
std::string describe(const Site& site) {
    return fmt::format("{}:{}", site.file, site.line);
}

std::string where(const Fiber& fiber) {
    return fmt::format("{}: block {} thread {}", kernel_name(machine().launch->text), describe(blockIdx),
                       describe(fiber.index));
}

[[noreturn]] void stop(const std::string& message) {
    static std::atomic_flag stopping;
    while (stopping.test_and_set()) pause();  // another thread's error is on its way, and one is enough
    std::fflush(stdout);
    std::fprintf(stderr, "emulator: error: %s\n", message.c_str());
    std::fflush(stderr);
    std::_Exit(70);
}

template <typename... Arguments>
[[noreturn]] void stop_thread(const Fiber& fiber, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    stop(where(fiber) + ": " + fmt::format(format, std::forward<Arguments>(arguments)...));
}

const char* name(Warp kind) {
    switch (kind) {
        case Warp::sync:
            return "__syncwarp";
        case Warp::shuffle:
            return "a shuffle";
        case Warp::ballot:
            return "a vote";
        case Warp::add:
            return "__reduce_add_sync";
        case Warp::sum_float:
        case Warp::sum_double:
            return "warp_sum";
        case Warp::max_float:
            return "warp_max";
        case Warp::mma_bf16:
            return "mma_bf16";
        case Warp::mma_tf32:
            return "mma_tf32";
        case Warp::load_matrix:
            return "load_matrix";
    }
    return "";
}

// The lanes of the fiber's warp in which a bit of the set is, as threads.
template <typename F>
void for_lanes(const Machine& m, const Fiber& fiber, uint32_t set, F f) {
    for (int l = 0; l < kLanes; l++)
        if (set >> l & 1) f(m.fibers[fiber.number / kLanes * kLanes + l]);
}

std::string describe(const WarpOperation& operation) {
    return fmt::format("{} with mask {:#010x} at {}", name(operation.kind), operation.mask, describe(operation.site));
}

// What the thread does, for which others wait in vain.
std::string describe(const Machine& m, const Fiber& fiber) {
    const WarpState& warp = m.warps[fiber.number / kLanes];
    const int lane = fiber.number % kLanes;
    const std::string text = "thread " + describe(fiber.index);
    if (warp.ended >> lane & 1) return text + " has ended";
    if (warp.at_barrier >> lane & 1) return text + " waits at __syncthreads at " + describe(m.barrier_site);
    if (warp.waiting >> lane & 1) return text + " waits at " + describe(*fiber.operation);
    return text + " runs";
}

bool same(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// A shuffle or a vote may stand in two places; PTX wants the one instruction where it says .aligned.
bool same(const WarpOperation& a, const WarpOperation& b) {
    const bool aligned = a.kind == Warp::mma_bf16 || a.kind == Warp::mma_tf32 || a.kind == Warp::load_matrix;
    return a.kind == b.kind && a.mask == b.mask && a.mode == b.mode && a.count == b.count &&
           a.transposed == b.transposed && (!aligned || same(a.site, b.site));
}

// The fiber waits in a warp operation. Stops if one of its lanes cannot come.
void check_lanes(const Machine& m, const Fiber& fiber) {
    const WarpState& warp = m.warps[fiber.number / kLanes];
    const WarpOperation& operation = *fiber.operation;
    for_lanes(m, fiber, operation.mask, [&](const Fiber& other) {
        const uint32_t bit = 1u << other.number % kLanes;
        if (((warp.ended | warp.at_barrier) & bit) || ((warp.waiting & bit) && !same(operation, *other.operation)))
            stop_thread(fiber, "waits at {}, but {}", describe(operation), describe(m, other));
    });
}

// The thread is at a barrier or has ended. Stops if a lane of its warp waits for it.
void check_not_wanted(const Machine& m, const Fiber& fiber) {
    const WarpState& warp = m.warps[fiber.number / kLanes];
    if (warp.wanted >> fiber.number % kLanes & 1)
        for_lanes(m, fiber, warp.waiting, [&](const Fiber& other) { check_lanes(m, other); });
}

// ---------------------------------------------------------------------------------------------------------------
// Fibers

void entry(context::transfer_t transfer);

int make_stack(Machine& m) {
    const size_t number = m.stacks.size();
    std::byte* bottom = m.stack_memory + number * kStackStride;
    mprotect(bottom, kPage, PROT_NONE);  // an overflow is a segmentation fault
    // The tops at different offsets within a page, for the same reason as the stride.
    const size_t offset = number % 32 * 128;
    m.stacks.push_back({bottom + kPage, kPage + kStackBytes - offset});
    return static_cast<int>(number);
}

Fiber& pick(Machine& m) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 7;
    m.random ^= m.random << 17;
    const uint64_t i = (m.random >> 32) * static_cast<uint64_t>(m.runnable_count) >> 32;
    Fiber& fiber = m.fibers[m.runnable[i]];
    m.runnable[i] = m.runnable[--m.runnable_count];
    return fiber;
}

void make_current(Machine& m, Fiber& fiber) {
    m.current = &fiber;
    threadIdx = fiber.index;
}

void start(Machine& m, Fiber& fiber) {
    if (m.free_stacks.empty()) m.free_stacks.push_back(make_stack(m));
    fiber.stack = m.free_stacks.back();
    m.free_stacks.pop_back();
    const Stack& stack = m.stacks[fiber.stack];
    fiber.context = context::make_fcontext(stack.bottom + stack.bytes, stack.bytes, entry);
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(stack.bottom, stack.bytes);
#endif
}

// Leaves `from` for `to`, and returns when `from` goes on; never if it is gone.
void jump(Machine& m, Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
    const Stack& stack = &to == &m.main ? m.main_stack : m.stacks[to.stack];
    __sanitizer_start_switch_fiber(&from == &m.gone ? nullptr : &from.fake_stack, stack.bottom, stack.bytes);
#endif
    const context::transfer_t transfer = context::jump_fcontext(to.context, &from);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
    (void)m;
    static_cast<Fiber*>(transfer.data)->context = transfer.fctx;
}

// Lanes wait for each other, in operations that differ.
[[noreturn]] void stop_all_wait(const Machine& m) {
    for (int i = 0; i < m.launch->threads; i++)
        if (m.warps[i / kLanes].waiting >> i % kLanes & 1) check_lanes(m, m.fibers[i]);
    stop_thread(*m.current, "no thread of the block can go on: {}", describe(m, *m.current));
}

// The current thread waits; others go on until it can.
void wait(Machine& m) {
    Fiber& me = *m.current;
    if (m.runnable_count == 0) stop_all_wait(m);
    Fiber& next = pick(m);
    if (&next == &me) return;
    if (next.context == nullptr) start(m, next);
    make_current(m, next);
    jump(m, me, next);
}

void end_thread(Machine& m, Fiber& me) {
    me.context = nullptr;
    m.warps[me.number / kLanes].ended |= 1u << me.number % kLanes;
    m.ended++;
    if (Copies& copies = m.copies[me.number]; copies.groups > 0 || !copies.under_way.empty()) {
        copies.under_way.clear();
        copies.groups = 0;
    }
    if (m.at_barrier > 0)
        stop_thread(me, "ends without reaching __syncthreads at {}, where {} of {} threads wait",
                    describe(m.barrier_site), m.at_barrier, m.launch->threads);
    check_not_wanted(m, me);
}

// Runs threads on one stack, one after the other, as long as the next one has not started.
void entry(context::transfer_t transfer) {
    Machine& m = machine();
    Fiber& before = *static_cast<Fiber*>(transfer.data);
    before.context = transfer.fctx;
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (&before == &m.main) m.main_stack = {static_cast<std::byte*>(const_cast<void*>(bottom)), bytes};
#endif
    for (;;) {
        Fiber& me = *m.current;
        m.launch->body(m.launch->arguments);
        end_thread(m, me);
        Fiber* next = &m.main;
        if (m.runnable_count > 0) {
            next = &pick(m);
            make_current(m, *next);
            if (next->context == nullptr) {
                next->stack = me.stack;
                continue;
            }
        } else if (m.ended < m.launch->threads) {
            stop_all_wait(m);
        }
        m.free_stacks.push_back(me.stack);  // nobody takes it before the jump
        jump(m, m.gone, *next);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Shared memory

std::byte* add_shared(Machine& m, size_t bytes) {
    const size_t padded = (bytes + kRedZone - 1) / kRedZone * kRedZone;
    if (m.shared_used + padded + 2 * kRedZone > kSharedArea)
        stop_thread(*m.current, "too many arrays in shared memory");
    std::byte* before = m.shared + m.shared_used;
    std::byte* data = before + kRedZone;
    m.shared_used += kRedZone + padded;
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    std::memset(data, kPoison, bytes);
#else
    std::memset(before, kPoison, padded + 2 * kRedZone);
#endif
    return data;
}

void start_shared(Machine& m) {
    m.shared_used = 0;
    m.static_shared = 0;
    m.arrays.clear();
    m.arrays.push_back(
        {nullptr, "dynamic shared memory", add_shared(m, m.launch->shared_bytes), m.launch->shared_bytes});
}

void end_shared(Machine& m) {
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(m.shared, m.shared_used + kRedZone);
#else
    // The red zone before each array, and the last one.
    const std::byte* p = m.shared;
    for (size_t i = 0; i <= m.arrays.size(); i++) {
        const std::byte* end = i < m.arrays.size() ? m.arrays[i].data : m.shared + m.shared_used + kRedZone;
        for (; p < end; p++)
            if (*p != std::byte{kPoison}) {
                // The nearer of two arrays is the one that was meant.
                const bool before =
                    i < m.arrays.size() && (i == 0 || end - p < p - (m.arrays[i - 1].data + m.arrays[i - 1].bytes));
                const SharedArray& array = m.arrays[before ? i : i - 1];
                stop(fmt::format("{}: block {}: a thread has written outside of {}, {} bytes from its start",
                                 kernel_name(m.launch->text), describe(blockIdx), array.name, p - array.data));
            }
        if (i < m.arrays.size()) p = m.arrays[i].data + m.arrays[i].bytes;
    }
#endif
}

// Whether the bytes lie in an array in shared memory.
bool in_shared(const Machine& m, const void* p, size_t bytes) {
    const std::byte* first = static_cast<const std::byte*>(p);
    for (const SharedArray& array : m.arrays)
        if (first >= array.data && first + bytes <= array.data + array.bytes) return true;
    return false;
}

bool is_aligned(const void* p, int bytes) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Warp operations, carried out for all lanes of a mask at once

using Row = float __attribute__((vector_size(32)));  // of d and b

// d (16, 8) += a (16, K) b (K, 8), with d in the lanes' registers. Products of bf16 and tf32 are exact; sums are in
// float, in the order of k. The device adds in an order of its own.
template <int K>
void multiply(WarpOperation* const lanes[kLanes], const float (&a)[K][16], const Row (&b)[K]) {
    Row d[16];
    for (int l = 0; l < kLanes; l++) {
        std::memcpy(reinterpret_cast<float*>(&d[l / 4]) + l % 4 * 2, lanes[l]->d, 8);
        std::memcpy(reinterpret_cast<float*>(&d[l / 4 + 8]) + l % 4 * 2, lanes[l]->d + 2, 8);
    }
    for (int half = 0; half < 16; half += 8) {
        Row sum[8];
        for (int row = 0; row < 8; row++) sum[row] = d[half + row];
        for (int k = 0; k < K; k++)
            for (int row = 0; row < 8; row++) sum[row] += a[k][half + row] * b[k];
        for (int row = 0; row < 8; row++) d[half + row] = sum[row];
    }
    for (int l = 0; l < kLanes; l++) {
        std::memcpy(lanes[l]->d, reinterpret_cast<float*>(&d[l / 4]) + l % 4 * 2, 8);
        std::memcpy(lanes[l]->d + 2, reinterpret_cast<float*>(&d[l / 4 + 8]) + l % 4 * 2, 8);
    }
}

void run_mma_bf16(WarpOperation* const lanes[kLanes]) {
    uint32_t a[16][16], b[16][8];  // float's bits, of which bf16 are the upper half
    for (int l = 0; l < kLanes; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = lanes[l]->a[i];
            a[2 * t + i / 2 * 8][g + i % 2 * 8] = pair << 16;
            a[2 * t + i / 2 * 8 + 1][g + i % 2 * 8] = pair & 0xffff0000u;
        }
        for (int i = 0; i < 2; i++) {
            const uint32_t pair = lanes[l]->b[i];
            b[2 * t + i * 8][g] = pair << 16;
            b[2 * t + i * 8 + 1][g] = pair & 0xffff0000u;
        }
    }
    float a_floats[16][16];
    Row b_rows[16];
    std::memcpy(a_floats, a, sizeof a);
    std::memcpy(b_rows, b, sizeof b);
    multiply<16>(lanes, a_floats, b_rows);
}

void run_mma_tf32(WarpOperation* const lanes[kLanes]) {
    uint32_t a[8][16], b[8][8];  // float's bits, of which the lower 13 do not count
    for (int l = 0; l < kLanes; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) a[t + i / 2 * 4][g + i % 2 * 8] = lanes[l]->a[i] & 0xffffe000u;
        for (int i = 0; i < 2; i++) b[t + i * 4][g] = lanes[l]->b[i] & 0xffffe000u;
    }
    float a_floats[8][16];
    Row b_rows[8];
    std::memcpy(a_floats, a, sizeof a);
    std::memcpy(b_rows, b, sizeof b);
    multiply<8>(lanes, a_floats, b_rows);
}

void run_load_matrix(Machine& m, WarpOperation* const lanes[kLanes]) {
    const int count = lanes[0]->count;
    const Fiber* first = &m.fibers[m.current->number / kLanes * kLanes];
    uint16_t rows[kLanes][8];
    for (int l = 0; l < 8 * count; l++) {
        if (!is_aligned(lanes[l]->row, 16) || !in_shared(m, lanes[l]->row, 16))
            stop_thread(first[l], "load_matrix at {} of a row that is not 16 aligned bytes of shared memory",
                        describe(lanes[l]->site));
        std::memcpy(rows[l], lanes[l]->row, 16);
    }
    for (int l = 0; l < kLanes; l++)
        for (int i = 0; i < count; i++) {
            const int g = l / 4, t = l % 4;
            const uint32_t low = lanes[l]->transposed ? rows[8 * i + 2 * t][g] : rows[8 * i + g][2 * t];
            const uint32_t high = lanes[l]->transposed ? rows[8 * i + 2 * t + 1][g] : rows[8 * i + g][2 * t + 1];
            lanes[l]->registers[i] = high << 16 | low;
        }
}

template <typename T, typename F>
void run_butterfly(WarpOperation* const lanes[kLanes], F combine) {
    T values[kLanes], combined[kLanes];
    for (int l = 0; l < kLanes; l++) std::memcpy(&values[l], &lanes[l]->value, sizeof(T));
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        for (int l = 0; l < kLanes; l++) combined[l] = combine(values[l], values[l ^ distance]);
        std::copy_n(combined, kLanes, values);
    }
    for (int l = 0; l < kLanes; l++) std::memcpy(&lanes[l]->value, &values[l], sizeof(T));
}

void run_operation(Machine& m, uint32_t mask, WarpOperation* const lanes[kLanes]) {
    const Warp kind = m.current->operation->kind;
    switch (kind) {
        case Warp::sync:
            break;
        case Warp::shuffle: {
            uint64_t values[kLanes];
            for (int l = 0; l < kLanes; l++)
                if (mask >> l & 1) values[l] = lanes[l]->value;
            for (int l = 0; l < kLanes; l++)
                if (mask >> l & 1) lanes[l]->value = values[lanes[l]->source];
            break;
        }
        case Warp::ballot:
        case Warp::add: {
            uint32_t result = 0;
            for (int l = 0; l < kLanes; l++)
                if (mask >> l & 1) {
                    const uint32_t value = static_cast<uint32_t>(lanes[l]->value);
                    result += kind == Warp::ballot ? value << l : value;
                }
            for (int l = 0; l < kLanes; l++)
                if (mask >> l & 1) lanes[l]->value = result;
            break;
        }
        case Warp::sum_float:
            run_butterfly<float>(lanes, [](float a, float b) { return a + b; });
            break;
        case Warp::sum_double:
            run_butterfly<double>(lanes, [](double a, double b) { return a + b; });
            break;
        case Warp::max_float:
            run_butterfly<float>(lanes, [](float a, float b) { return fmaxf(a, b); });
            break;
        case Warp::mma_bf16:
            run_mma_bf16(lanes);
            break;
        case Warp::mma_tf32:
            run_mma_tf32(lanes);
            break;
        case Warp::load_matrix:
            run_load_matrix(m, lanes);
            break;
    }
}

void make_all_runnable(Machine& m) {
    for (int i = 0; i < m.launch->threads; i++) m.runnable[i] = static_cast<uint16_t>(i);
    m.runnable_count = m.launch->threads;
}

void run_block(Machine& m, const Launch& launch, uint64_t number) {
    m.launch = &launch;
    blockDim = launch.block;
    gridDim = launch.grid;
    blockIdx.x = static_cast<unsigned>(number % launch.grid.x);
    blockIdx.y = static_cast<unsigned>(number / launch.grid.x % launch.grid.y);
    blockIdx.z = static_cast<unsigned>(number / launch.grid.x / launch.grid.y);
    m.random = mix(launch.seed ^ mix(number)) | 1;
    if (m.shape.x != blockDim.x || m.shape.y != blockDim.y || m.shape.z != blockDim.z) {
        m.shape = blockDim;
        int i = 0;
        for (unsigned z = 0; z < blockDim.z; z++)
            for (unsigned y = 0; y < blockDim.y; y++)
                for (unsigned x = 0; x < blockDim.x; x++, i++) m.fibers[i].index = {x, y, z}, m.fibers[i].number = i;
    }
    m.at_barrier = m.ended = 0;
    std::fill_n(m.warps, (launch.threads + kLanes - 1) / kLanes, WarpState{});
    make_all_runnable(m);
    start_shared(m);
    Fiber& first = pick(m);
    start(m, first);
    make_current(m, first);
    jump(m, m.main, first);
    end_shared(m);
    m.current = nullptr;
}

}  // namespace

int lane() {
    return machine().current->number % kLanes;
}

int shuffle_source(Shuffle kind, int operand, int width) {
    const int me = lane();
    const int b = operand & 31;  // as the shfl instruction takes it
    const int first = me & ~(width - 1), last = first + width - 1;
    int source = me;
    switch (kind) {
        case Shuffle::index:
            source = first | (b & (width - 1));
            break;
        case Shuffle::up:
            source = me - b < first ? me : me - b;
            break;
        case Shuffle::down:
            source = me + b > last ? me : me + b;
            break;
        case Shuffle::exclusive_or:
            source = (me ^ b) > last ? me : me ^ b;
            break;
    }
    return source;
}

void block_barrier(Site site) {
    Machine& m = machine();
    Fiber& me = *m.current;
    if (m.ended > 0)
        for (int i = 0; i < m.launch->threads; i++)
            if (m.warps[i / kLanes].ended >> i % kLanes & 1)
                stop_thread(me, "waits at __syncthreads at {}, but {}", describe(site), describe(m, m.fibers[i]));
    if (m.at_barrier == 0) m.barrier_site = site;
    if (!same(site, m.barrier_site))
        stop_thread(me, "waits at __syncthreads at {}, while others wait at __syncthreads at {}", describe(site),
                    describe(m.barrier_site));
    m.warps[me.number / kLanes].at_barrier |= 1u << me.number % kLanes;
    check_not_wanted(m, me);
    if (++m.at_barrier == m.launch->threads) {
        m.at_barrier = 0;
        for (int w = 0; w < (m.launch->threads + kLanes - 1) / kLanes; w++) m.warps[w].at_barrier = 0;
        make_all_runnable(m);
    }
    wait(m);
}

void warp_operation(WarpOperation& operation) {
    Machine& m = machine();
    Fiber& me = *m.current;
    const int first = me.number / kLanes * kLanes, my_lane = me.number % kLanes;
    WarpState& warp = m.warps[me.number / kLanes];
    const uint32_t mask = operation.mask;
    const int size = std::min(kLanes, m.launch->threads - first);
    if (size < kLanes && mask >> size != 0)
        stop_thread(me, "{}, but the warp has {} threads", describe(operation), size);
    if ((mask >> my_lane & 1) == 0)
        stop_thread(me, "{}, which does not name its own lane {}", describe(operation), my_lane);
    if ((mask >> operation.source & 1) == 0 && operation.kind == Warp::shuffle)
        stop_thread(me, "{} from lane {}, which the mask does not name", describe(operation), operation.source);
    me.operation = &operation;
    warp.waiting |= 1u << my_lane;
    warp.wanted |= mask;
    // Whether all who wait agree is looked at when they are complete, or nobody can go on.
    if (mask & (warp.ended | warp.at_barrier)) check_lanes(m, me);
    if ((warp.waiting & mask) == mask) {
        check_lanes(m, me);
        WarpOperation* lanes[kLanes] = {};
        for (int l = 0; l < size; l++)
            if (mask >> l & 1) {
                lanes[l] = m.fibers[first + l].operation;
                m.runnable[m.runnable_count++] = static_cast<uint16_t>(first + l);
            }
        run_operation(m, mask, lanes);
        warp.waiting &= ~mask;
        warp.wanted = 0;
        for_lanes(m, me, warp.waiting, [&](const Fiber& other) { warp.wanted |= other.operation->mask; });
    }
    wait(m);
}

void* shared_array(const void* key, const char* name, size_t bytes, size_t alignment) {
    Machine& m = machine();
    for (const SharedArray& array : m.arrays)
        if (array.key == key) return array.data;
    if (alignment > kRedZone) stop_thread(*m.current, "{} wants an alignment of {} bytes", name, alignment);
    m.static_shared += bytes;
    if (m.static_shared > kMaxStaticShared)
        stop_thread(*m.current, "static shared memory over {} bytes with {}", kMaxStaticShared, name);
    if (m.static_shared + m.launch->shared_bytes > kMaxShared)
        stop_thread(*m.current, "shared memory over {} bytes with {}", kMaxShared, name);
    m.arrays.push_back({key, name, add_shared(m, bytes), bytes});
    return m.arrays.back().data;
}

void* dynamic_shared_memory() {
    return machine().arrays[0].data;
}

void check_dynamic_shared(size_t bytes) {
    Machine& m = machine();
    if (m.launch->shared_bytes != bytes)
        stop_thread(*m.current, "{} bytes of dynamic shared memory, but the launch gave {}", bytes,
                    m.launch->shared_bytes);
}

void copy_async(void* shared, const void* global, int bytes, bool zeros) {
    Machine& m = machine();
    Fiber& me = *m.current;
    Copies& copies = m.copies[me.number];
    if (!is_aligned(shared, bytes) || !in_shared(m, shared, bytes))
        stop_thread(me, "copy_async_{} to what is not {} aligned bytes of shared memory", bytes, bytes);
    if (in_shared(m, global, bytes)) stop_thread(me, "copy_async_{} from shared memory", bytes);
    if (!is_aligned(global, bytes))
        stop_thread(me, "copy_async_{} from an address that is not aligned to {} bytes", bytes, bytes);
#ifdef __SANITIZE_ADDRESS__
    // So that an error is found here, not at the wait.
    if (!zeros && __asan_region_is_poisoned(const_cast<void*>(global), bytes) != nullptr) {
        unsigned char discard[16];
        std::memcpy(discard, global, bytes);
    }
#endif
    std::memset(shared, kPoison, bytes);
    copies.under_way.push_back({static_cast<std::byte*>(shared),
                                zeros ? nullptr : static_cast<const std::byte*>(global), bytes, copies.groups});
}

void copy_async_commit() {
    Machine& m = machine();
    m.copies[m.current->number].groups++;
}

void copy_async_wait(int groups_left) {
    Machine& m = machine();
    Copies& copies = m.copies[m.current->number];
    if (copies.under_way.empty() || copies.under_way[0].group >= copies.groups - groups_left) return;
    // Others run before the bytes are there, so that those show who still read what was here before.
    m.runnable[m.runnable_count++] = static_cast<uint16_t>(m.current->number);
    wait(m);
    size_t done = 0;
    for (; done < copies.under_way.size() && copies.under_way[done].group < copies.groups - groups_left; done++) {
        const Copy& copy = copies.under_way[done];
        if (copy.from != nullptr) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
            std::memset(copy.to, 0, copy.bytes);
        }
    }
    copies.under_way.erase(copies.under_way.begin(), copies.under_way.begin() + static_cast<std::ptrdiff_t>(done));
}

void check_launch(const char* text, dim3 grid, dim3 block, size_t shared_bytes) {
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    if (threads == 0 || threads > kMaxThreads || block.z > 64 || blocks == 0 || grid.x > 0x7fffffffu ||
        grid.y > 65535 || grid.z > 65535 || shared_bytes > kMaxShared)
        throw std::runtime_error(
            fmt::format("{}: invalid argument: grid ({},{},{}), block ({},{},{}), {} bytes of shared memory",
                        kernel_name(text), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes));
}

void run_grid(const char* text, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*),
              const void* arguments) {
    static std::atomic<uint64_t> launches = 0;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    const char* seed_text = std::getenv("JETLAG_EMU_SEED");
    uint64_t seed = 1;
    if (seed_text != nullptr) {
        const char* end = seed_text + std::strlen(seed_text);
        if (const auto [at, error] = std::from_chars(seed_text, end, seed); error != std::errc() || at != end)
            throw std::runtime_error(fmt::format("JETLAG_EMU_SEED={}: wanted a number", seed_text));
    }
    const Launch launch{
        text, grid, block, shared_bytes, body, arguments, mix(seed ^ mix(launches++)), static_cast<int>(threads)};
    // i -> (i * prime + shift) mod blocks goes through all blocks: no number of blocks is a multiple of the prime.
    const uint64_t prime = 4294967291, shift = launch.seed % blocks;
    const int team = static_cast<int>(std::min<uint64_t>(blocks, static_cast<uint64_t>(omp_get_max_threads())));
#pragma omp parallel num_threads(team) if (team > 1)
    {
        Machine& m = make_machine();
#pragma omp for schedule(dynamic)
        for (uint64_t i = 0; i < blocks; i++) run_block(m, launch, (i % blocks * (prime % blocks) + shift) % blocks);
    }
}

}  // namespace jetlag::emu

#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer calls this before its report.
extern "C" void __asan_on_error() {
    using namespace jetlag::emu;
    if (machine_of_thread != nullptr && machine_of_thread->current != nullptr)
        std::fprintf(stderr, "emulator: error: %s: bad access:\n", where(*machine_of_thread->current).c_str());
}
#endif
