// Runs the threads of blocks as fibers; see emu.h.

#include "kernels/emu/emu.h"

#include <fmt/format.h>
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

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
constexpr bool kAddressSanitizer = true;
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr bool kAddressSanitizer = false;
constexpr size_t kStackBytes = 64 * 1024;
#endif

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
// As compute capability 8.6 and 12.0 have it, the least of what we build for.
constexpr size_t kMaxStaticShared = 48 * 1024, kMaxShared = 99 * 1024;

enum class State : uint8_t { fresh, runnable, at_barrier, in_warp_operation, ended };

struct Stack {
    std::byte* bottom;
    std::byte* top;
};

// A copy under way. A group without a copy is nobody's business.
struct Copy {
    std::byte* to;
    const std::byte* from;
    int bytes;
    int group;
};

// A thread of the running block.
struct Fiber {
    context::fcontext_t context;
    Stack stack;
    uint3 index;
    int number;  // in the block
    State state;
    Site site;                 // where it waits
    WarpOperation* operation;  // in_warp_operation
    int groups;                // of asynchronous copies that it committed
    std::vector<Copy> copies;
    void* fake_stack;  // AddressSanitizer's
};

struct WarpState {
    uint32_t waiting;  // lanes in a warp operation
    uint32_t wanted;   // lanes that those wait for
    uint32_t ended;
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
    Fiber main{};
    Fiber* current = nullptr;
    std::vector<Fiber> fibers{kMaxThreads};
    WarpState warps[kMaxThreads / kLanes];

    int runnable[kMaxThreads];
    int runnable_count = 0;
    int at_barrier = 0, ended = 0;
    Site barrier_site{};
    uint64_t random = 0;

    // Stacks are made when first needed. A kernel whose threads never wait needs one for all of them.
    std::vector<Stack> free_stacks;
    int stacks = 0;
    std::byte* stack_memory = nullptr;

    // Arrays in shared memory, one after the other, with red zones before, between and after.
    std::byte* shared = nullptr;
    size_t shared_used = 0, static_shared = 0;
    std::vector<SharedArray> arrays;

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

// A function of its own: a fiber that waits may not keep the address of a thread_local, were it ever to move.
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

std::string kernel_name(const char* text) {
    int depth = 0;
    const char* end = text;
    for (; *end != '\0' && (depth > 0 || *end != ','); end++) depth += (*end == '<') - (*end == '>');
    return std::string(text, end);
}

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
        case Warp::mma_bf16:
            return "mma_bf16";
        case Warp::mma_tf32:
            return "mma_tf32";
        case Warp::load_matrix:
            return "load_matrix";
    }
    return "";
}

// What the thread does that others wait for in vain.
std::string describe(const Fiber& fiber) {
    std::string text = "thread " + describe(fiber.index);
    if (fiber.state == State::ended) return text + " has ended";
    if (fiber.state == State::at_barrier) return text + " is at __syncthreads at " + describe(fiber.site);
    if (fiber.state == State::in_warp_operation)
        return text + fmt::format(" is at {} with mask {:#010x} at {}", name(fiber.operation->kind),
                                  fiber.operation->mask, describe(fiber.site));
    return text + " runs";
}

// ---------------------------------------------------------------------------------------------------------------
// Fibers

void entry(context::transfer_t transfer);

Stack make_stack(Machine& m) {
    const size_t number = static_cast<size_t>(m.stacks++);
    std::byte* bottom = m.stack_memory + number * kStackStride;
    mprotect(bottom, kPage, PROT_NONE);  // an overflow is a segmentation fault
    // The tops at different offsets within a page, for the same reason as the stride.
    const size_t offset = number % 32 * 64 * 2;
    return {bottom + kPage, bottom + kPage + kStackBytes - offset};
}

int pick(Machine& m) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 7;
    m.random ^= m.random << 17;
    const int i = static_cast<int>((m.random >> 32) * static_cast<uint64_t>(m.runnable_count) >> 32);
    const int number = m.runnable[i];
    m.runnable[i] = m.runnable[--m.runnable_count];
    return number;
}

void make_current(Machine& m, Fiber& fiber) {
    m.current = &fiber;
    threadIdx = fiber.index;
}

// Leaves `from` for `to`, and returns when `from` goes on.
void jump(Machine& m, Fiber& from, Fiber& to, bool for_good) {
    if (to.state == State::fresh) {
        if (m.free_stacks.empty()) m.free_stacks.push_back(make_stack(m));
        to.stack = m.free_stacks.back();
        m.free_stacks.pop_back();
        to.context = context::make_fcontext(to.stack.top, static_cast<size_t>(to.stack.top - to.stack.bottom), entry);
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(to.stack.bottom, static_cast<size_t>(to.stack.top - to.stack.bottom));
#endif
    }
    if (&to != &m.main) make_current(m, to);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack.bottom,
                                   static_cast<size_t>(to.stack.top - to.stack.bottom));
#else
    (void)for_good;
#endif
    const context::transfer_t transfer = context::jump_fcontext(to.context, &from);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
    static_cast<Fiber*>(transfer.data)->context = transfer.fctx;
}

// The current thread waits; others go on until it can.
void wait(Machine& m) {
    Fiber& me = *m.current;
    if (m.runnable_count == 0) stop_thread(me, "no thread of the block can go on: {}", describe(me));
    const int next = pick(m);
    Fiber& to = m.fibers[static_cast<size_t>(next)];
    if (&to != &me) jump(m, me, to, false);
}

void end_thread(Machine& m, Fiber& me) {
    WarpState& warp = m.warps[me.number / kLanes];
    const uint32_t bit = 1u << me.number % kLanes;
    me.state = State::ended;
    warp.ended |= bit;
    m.ended++;
    if (m.at_barrier > 0)
        stop_thread(me, "ends without reaching __syncthreads at {}, where {} threads wait", describe(m.barrier_site),
                    m.at_barrier);
    if (warp.wanted & bit)
        for (int lane = 0; lane < kLanes; lane++)
            if (const Fiber& other = m.fibers[static_cast<size_t>(me.number / kLanes * kLanes + lane)];
                (warp.waiting >> lane & 1) && (other.operation->mask & bit))
                stop_thread(other, "waits at {} with mask {:#010x} at {}, but {}", name(other.operation->kind),
                            other.operation->mask, describe(other.site), describe(me));
}

// Runs threads on one stack, one after the other, as long as the next one is fresh.
void entry(context::transfer_t transfer) {
    Machine& m = machine();
    Fiber& before = *static_cast<Fiber*>(transfer.data);
    before.context = transfer.fctx;
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (&before == &m.main) {
        m.main.stack.bottom = static_cast<std::byte*>(const_cast<void*>(bottom));
        m.main.stack.top = m.main.stack.bottom + size;
    }
#endif
    Fiber* me = m.current;
    for (;;) {
        me->state = State::runnable;
        m.launch->body(m.launch->arguments);
        end_thread(m, *me);
        Fiber* next = &m.main;
        if (m.runnable_count > 0) {
            next = &m.fibers[static_cast<size_t>(pick(m))];
        } else if (m.ended < m.launch->threads) {
            stop_thread(*me, "ends, and no other thread of the block can go on");
        }
        if (next->state == State::fresh) {
            next->stack = me->stack;
            me = next;
            make_current(m, *me);
            continue;
        }
        m.free_stacks.push_back(me->stack);  // used again only after the jump
        jump(m, *me, *next, true);
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
    for (const SharedArray& array : m.arrays) {
        const std::byte* end = array.data + (array.bytes + kRedZone - 1) / kRedZone * kRedZone + kRedZone;
        for (const std::byte* p = array.data - kRedZone; p < end; p++) {
            if (p == array.data) p += array.bytes;
            if (*p != std::byte{kPoison})
                stop(fmt::format("{}: block {}: a thread has written outside of {}, {} bytes from its start",
                                 kernel_name(m.launch->text), describe(blockIdx), array.name, p - array.data));
        }
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

float low_bf16(uint32_t pair) {
    return std::bit_cast<float>(pair << 16);
}
float high_bf16(uint32_t pair) {
    return std::bit_cast<float>(pair & 0xffff0000u);
}
float tf32(uint32_t bits) {
    return std::bit_cast<float>(bits & 0xffffe000u);
}

// d (16, 8) += a (16, K) b (K, 8), with d in the lanes' registers.
template <int K>
void multiply(WarpOperation* const lanes[kLanes], const float (&a)[16][K], const float (&b)[K][8]) {
    float d[16][8];
    for (int l = 0; l < kLanes; l++)
        for (int i = 0; i < 4; i++) d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] = lanes[l]->d[i];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < K; k++)
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    for (int l = 0; l < kLanes; l++)
        for (int i = 0; i < 4; i++) lanes[l]->d[i] = d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

void run_mma_bf16(WarpOperation* const lanes[kLanes]) {
    float a[16][16], b[16][8];
    for (int l = 0; l < kLanes; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) {
            a[g + i % 2 * 8][2 * t + i / 2 * 8] = low_bf16(lanes[l]->a[i]);
            a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = high_bf16(lanes[l]->a[i]);
        }
        for (int i = 0; i < 2; i++) {
            b[2 * t + i * 8][g] = low_bf16(lanes[l]->b[i]);
            b[2 * t + i * 8 + 1][g] = high_bf16(lanes[l]->b[i]);
        }
    }
    multiply<16>(lanes, a, b);
}

void run_mma_tf32(WarpOperation* const lanes[kLanes]) {
    float a[16][8], b[8][8];
    for (int l = 0; l < kLanes; l++) {
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(lanes[l]->a[i]);
        for (int i = 0; i < 2; i++) b[t + i * 4][g] = tf32(lanes[l]->b[i]);
    }
    multiply<8>(lanes, a, b);
}

void run_load_matrix(Machine& m, WarpOperation* const lanes[kLanes]) {
    const int count = lanes[0]->count;
    const Fiber* first = &m.fibers[static_cast<size_t>(m.current->number / kLanes * kLanes)];
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

bool same(const WarpOperation& a, const WarpOperation& b) {
    return a.kind == b.kind && a.mask == b.mask && a.count == b.count && a.transposed == b.transposed;
}

void run_block(Machine& m, const Launch& launch, uint64_t number) {
    m.launch = &launch;
    blockDim = launch.block;
    gridDim = launch.grid;
    blockIdx.x = static_cast<unsigned>(number % launch.grid.x);
    blockIdx.y = static_cast<unsigned>(number / launch.grid.x % launch.grid.y);
    blockIdx.z = static_cast<unsigned>(number / launch.grid.x / launch.grid.y);
    m.random = mix(launch.seed ^ mix(number)) | 1;
    m.at_barrier = m.ended = 0;
    for (int w = 0; w < (launch.threads + kLanes - 1) / kLanes; w++) m.warps[w] = {};
    int i = 0;
    for (unsigned z = 0; z < launch.block.z; z++)
        for (unsigned y = 0; y < launch.block.y; y++)
            for (unsigned x = 0; x < launch.block.x; x++, i++) {
                Fiber& fiber = m.fibers[static_cast<size_t>(i)];
                fiber.index = {x, y, z};
                fiber.number = i;
                fiber.state = State::fresh;
                fiber.groups = 0;
                fiber.copies.clear();
                m.runnable[i] = i;
            }
    m.runnable_count = launch.threads;
    start_shared(m);
    m.main.state = State::runnable;
    jump(m, m.main, m.fibers[static_cast<size_t>(pick(m))], false);
    end_shared(m);
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
    const WarpState& warp = m.warps[me.number / kLanes];
    me.site = site;
    if (m.ended > 0) {
        for (int i = 0; i < m.launch->threads; i++)
            if (const Fiber& other = m.fibers[static_cast<size_t>(i)]; other.state == State::ended)
                stop_thread(me, "waits at __syncthreads at {}, but {}", describe(site), describe(other));
    }
    if (m.at_barrier == 0) {
        m.barrier_site = site;
    } else if (site.line != m.barrier_site.line || std::strcmp(site.file, m.barrier_site.file) != 0) {
        stop_thread(me, "waits at __syncthreads at {}, while other threads wait at __syncthreads at {}", describe(site),
                    describe(m.barrier_site));
    }
    me.state = State::at_barrier;
    if (warp.wanted >> me.number % kLanes & 1)
        for (int l = 0; l < kLanes; l++)
            if (const Fiber& other = m.fibers[static_cast<size_t>(me.number / kLanes * kLanes + l)];
                (warp.waiting >> l & 1) && (other.operation->mask >> me.number % kLanes & 1))
                stop_thread(other, "waits at {} with mask {:#010x} at {}, but {}", name(other.operation->kind),
                            other.operation->mask, describe(other.site), describe(me));
    if (++m.at_barrier == m.launch->threads) {
        m.at_barrier = 0;
        for (int i = 0; i < m.launch->threads; i++) {
            m.fibers[static_cast<size_t>(i)].state = State::runnable;
            m.runnable[i] = i;
        }
        m.runnable_count = m.launch->threads;
    }
    wait(m);
}

void warp_operation(WarpOperation& operation) {
    Machine& m = machine();
    Fiber& me = *m.current;
    const int first = me.number / kLanes * kLanes, my_lane = me.number % kLanes;
    WarpState& warp = m.warps[me.number / kLanes];
    const uint32_t mask = operation.mask;
    me.site = operation.site;
    me.operation = &operation;
    const int size = std::min(kLanes, m.launch->threads - first);
    if (size < kLanes && mask >> size != 0)
        stop_thread(me, "{} with mask {:#010x} at {}, but the warp has {} threads", name(operation.kind), mask,
                    describe(me.site), size);
    if ((mask >> my_lane & 1) == 0)
        stop_thread(me, "{} with mask {:#010x} at {} does not name its own lane {}", name(operation.kind), mask,
                    describe(me.site), my_lane);
    if ((mask >> operation.source & 1) == 0 && operation.kind == Warp::shuffle)
        stop_thread(me, "{} with mask {:#010x} at {} from lane {}, which the mask does not name", name(operation.kind),
                    mask, describe(me.site), operation.source);
    for (int l = 0; l < size; l++) {
        if ((mask >> l & 1) == 0 || l == my_lane) continue;
        const Fiber& other = m.fibers[static_cast<size_t>(first + l)];
        if (other.state == State::ended || other.state == State::at_barrier ||
            (other.state == State::in_warp_operation && !same(operation, *other.operation)))
            stop_thread(me, "waits at {} with mask {:#010x} at {}, but {}", name(operation.kind), mask,
                        describe(me.site), describe(other));
    }
    me.state = State::in_warp_operation;
    warp.waiting |= 1u << my_lane;
    warp.wanted |= mask;
    if ((warp.waiting & mask) == mask) {
        WarpOperation* lanes[kLanes] = {};
        for (int l = 0; l < size; l++)
            if (mask >> l & 1) lanes[l] = m.fibers[static_cast<size_t>(first + l)].operation;
        run_operation(m, mask, lanes);
        warp.waiting &= ~mask;
        warp.wanted = 0;
        for (int l = 0; l < size; l++) {
            Fiber& fiber = m.fibers[static_cast<size_t>(first + l)];
            if (mask >> l & 1) {
                fiber.state = State::runnable;
                m.runnable[m.runnable_count++] = fiber.number;
            } else if (warp.waiting >> l & 1) {
                warp.wanted |= fiber.operation->mask;
            }
        }
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
    m.arrays.push_back({key, name, add_shared(m, bytes), bytes});
    return m.arrays.back().data;
}

void* dynamic_shared_memory() {
    return machine().arrays[0].data;
}

void copy_async(void* shared, const void* global, int bytes, bool zeros) {
    Machine& m = machine();
    Fiber& me = *m.current;
    if (!is_aligned(shared, bytes) || !in_shared(m, shared, static_cast<size_t>(bytes)))
        stop_thread(me, "copy_async_{} to what is not {} aligned bytes of shared memory", bytes, bytes);
    if (!is_aligned(global, bytes))
        stop_thread(me, "copy_async_{} from an address that is not aligned to {} bytes", bytes, bytes);
#ifdef __SANITIZE_ADDRESS__
    // So that an error is found here, not at the wait.
    if (!zeros && __asan_region_is_poisoned(const_cast<void*>(global), static_cast<size_t>(bytes)) != nullptr) {
        unsigned char discard[16];
        std::memcpy(discard, global, static_cast<size_t>(bytes));
    }
#endif
    std::memset(shared, kPoison, static_cast<size_t>(bytes));
    me.copies.push_back(
        {static_cast<std::byte*>(shared), zeros ? nullptr : static_cast<const std::byte*>(global), bytes, me.groups});
}

void copy_async_commit() {
    machine().current->groups++;
}

void copy_async_wait(int groups_left) {
    Fiber& me = *machine().current;
    size_t done = 0;
    for (; done < me.copies.size() && me.copies[done].group < me.groups - groups_left; done++) {
        const Copy& copy = me.copies[done];
        if (copy.from != nullptr) {
            std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
        } else {
            std::memset(copy.to, 0, static_cast<size_t>(copy.bytes));
        }
    }
    me.copies.erase(me.copies.begin(), me.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

void run_grid(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*),
              const void* arguments) {
    static std::atomic<uint64_t> launches = 0;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    if (threads == 0 || threads > kMaxThreads || blocks == 0 || grid.y > 65535 || grid.z > 65535 ||
        grid.x > 0x7fffffffu || block.z > 64 || shared_bytes > kMaxShared)
        stop(fmt::format("{}: cannot launch grid ({},{},{}) with blocks ({},{},{}) and {} bytes of shared memory",
                         kernel_name(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes));

    const char* seed_text = std::getenv("JETLAG_EMU_SEED");
    const uint64_t seed = seed_text == nullptr ? 1 : std::strtoull(seed_text, nullptr, 10);
    const Launch launch{
        kernel, grid, block, shared_bytes, body, arguments, mix(seed ^ mix(launches++)), static_cast<int>(threads)};
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
    if (machine_of_thread != nullptr && machine_of_thread->launch != nullptr)
        std::fprintf(stderr, "emulator: error: %s: bad access:\n", where(*machine_of_thread->current).c_str());
}
#endif
