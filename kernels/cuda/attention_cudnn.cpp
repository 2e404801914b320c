// Attention through cuDNN, for calls without a lag bias: its fused kernels for softmax(Q K^T) V, in bf16, as what to
// compare ours with.
//
// cuDNN is told what to compute as a graph of operations on tensors, and answers with engines, kernels that it compiles
// for a graph that it recognises. Only tensors with an address exist in memory; those of T x T are virtual. Forward:
//
//     S = mask(Q K^T)    m = max S    e = exp(S - m)    l = sum e    lse = m + ln l    O = (e / l) V
//
// with the sums over keys, and mask(S) = S where the row's index is at least the key's, and -infinity elsewhere.
// Backward:
//
//     delta = sum dO O    P = exp(mask(Q K^T - lse))    dV = P^T dO
//     dS = P (dO V^T - delta)    dK = dS^T Q    dQ = dS K
//
// Written so, with dQ a product like the others, cuDNN adds dQ in a fixed order, as its own front end has it where
// determinism is asked for, and keeps dS in bf16 for that: B H T T values of workspace. (With dQ a float tensor that is
// then rounded, it adds tiles to it as they come, in any order.)
//
// Q and K are rotated, Q is times 1 / sqrt(D), by attention.cu's own packing; V, dO, O and dV stay where they are in
// (B, T, 3, H, D) and (B, T, H, D), by their strides.
//
// A plan, an engine with its settings, is made at the first call of a shape and kept. Like scratch memory it is there
// before a graph of launches is captured.
#include <cudnn.h>

#include <array>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_rows.h"
#include "kernels/ops.h"

namespace jetlag {

cudaStream_t device_stream();  // of kernels/cuda/device.h and runtime.h, which are for kernels and nvcc
void* device_scratch(size_t bytes);

namespace {

static_assert(kHalfPrecision, "cuDNN's attention takes bf16");

void check(cudnnStatus_t status, const std::string& what) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    std::array<char, 512> more = {};
    cudnnGetLastErrorString(more.data(), more.size());
    throw std::runtime_error("cuDNN, " + what + ": " + cudnnGetErrorString(status) + ": " + more.data());
}

// ---------------------------------------------------------------------------------------------------------------
// Descriptors: cuDNN's objects, which are made, get attributes, and are finalized.

using Descriptor = std::shared_ptr<void>;

Descriptor make(cudnnBackendDescriptorType_t type) {
    cudnnBackendDescriptor_t made = nullptr;
    check(cudnnBackendCreateDescriptor(type, &made), "descriptor");
    return {made, [](void* descriptor) { cudnnBackendDestroyDescriptor(descriptor); }};
}

void finalize(const Descriptor& descriptor, const std::string& what) {
    check(cudnnBackendFinalize(descriptor.get()), what);
}

template <typename T>
void set_all(const Descriptor& descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
             std::span<const T> values) {
    check(cudnnBackendSetAttribute(descriptor.get(), name, type, std::ssize(values), values.data()), "attribute");
}
template <typename T>
void set(const Descriptor& descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
         const T& value) {
    set_all(descriptor, name, type, std::span<const T>(&value, 1));
}
void set(const Descriptor& descriptor, cudnnBackendAttributeName_t name, const Descriptor& value) {
    set(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.get());
}

// ---------------------------------------------------------------------------------------------------------------
// Graphs

struct Shape {
    int64_t B, T, H, D;
    bool backward;
    auto operator<=>(const Shape&) const = default;
};

std::string text_of(const Shape& shape) {
    return std::string(shape.backward ? "backward" : "forward") + " of B " + std::to_string(shape.B) + ", T " +
           std::to_string(shape.T) + ", H " + std::to_string(shape.H) + ", D " + std::to_string(shape.D);
}

// Names of the tensors that have an address, on the device or, from kMasked on, on the host.
enum Name : int64_t {
    kQuery = 1,  // (B, H, T, D)
    kKey,        // (B, H, T, D)
    kValue,      // of (B, T, 3, H, D)
    kOut,        // (B, T, H, D)
    kLse,        // (B, H, T)
    kDout,       // (B, T, H, D)
    kDquery,     // (B, H, T, D)
    kDkey,       // (B, H, T, D)
    kDvalue,     // of (B, T, 3, H, D)
    kDelta,      // (B, H, T)
    kMasked,     // -infinity
    kOne,        // 1
    kFirstVirtual
};

using Four = std::array<int64_t, 4>;

struct OperationGraph {
    Shape shape;
    std::vector<Descriptor> kept;  // what the operations refer to, and they
    std::vector<cudnnBackendDescriptor_t> operations;
    int64_t next_virtual = kFirstVirtual;
};

Descriptor add_tensor(OperationGraph& graph, int64_t name, cudnnDataType_t type, const Four& sizes,
                      const Four& strides) {
    const Descriptor tensor = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, name);
    set(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    set(tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16});
    set_all(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::span<const int64_t>(sizes));
    set_all(tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const int64_t>(strides));
    set(tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, name >= kFirstVirtual);
    set(tensor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, name == kMasked || name == kOne);
    finalize(tensor, "tensor");
    graph.kept.push_back(tensor);
    return tensor;
}

// Sizes and strides of a tensor with its last two dimensions exchanged.
Four exchanged(const Four& x) {
    return {x[0], x[1], x[3], x[2]};
}

// Rows of D channels, in bf16: B, H, T, D in the order of the sizes, at their places in memory.
enum class Layout { packed, in_qkv, in_out };
Four strides_of(const Shape& s, Layout layout) {
    if (layout == Layout::packed) return {s.H * s.T * s.D, s.T * s.D, s.D, 1};
    const int64_t token = (layout == Layout::in_qkv ? 3 : 1) * s.H * s.D;
    return {s.T * token, s.D, token, 1};
}
Descriptor add_rows(OperationGraph& graph, Name name, Layout layout) {
    const Shape& s = graph.shape;
    return add_tensor(graph, name, CUDNN_DATA_BFLOAT16, {s.B, s.H, s.T, s.D}, strides_of(s, layout));
}
Descriptor add_rows_transposed(OperationGraph& graph, Name name, Layout layout) {
    const Shape& s = graph.shape;
    return add_tensor(graph, name, CUDNN_DATA_BFLOAT16, {s.B, s.H, s.D, s.T}, exchanged(strides_of(s, layout)));
}

// A number for each row: named, or a virtual one.
Descriptor add_numbers(OperationGraph& graph, int64_t name) {
    const Shape& s = graph.shape;
    return add_tensor(graph, name, CUDNN_DATA_FLOAT, {s.B, s.H, s.T, 1}, {s.H * s.T, s.T, 1, 1});
}
Descriptor add_numbers(OperationGraph& graph) {
    return add_numbers(graph, graph.next_virtual++);
}

Descriptor add_scalar(OperationGraph& graph, Name name) {
    return add_tensor(graph, name, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1});
}

// A value for each row and key, never in memory.
Descriptor add_scores(OperationGraph& graph, cudnnDataType_t type) {
    const Shape& s = graph.shape;
    return add_tensor(graph, graph.next_virtual++, type, {s.B, s.H, s.T, s.T}, {s.H * s.T * s.T, s.T * s.T, s.T, 1});
}

void add_operation(OperationGraph& graph, const Descriptor& operation, const char* what) {
    finalize(operation, what);
    graph.kept.push_back(operation);
    graph.operations.push_back(operation.get());
}

// c = a b
void multiply(OperationGraph& graph, const Descriptor& a, const Descriptor& b, const Descriptor& c) {
    const Descriptor product = make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(product, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    finalize(product, "product");
    graph.kept.push_back(product);
    const Descriptor operation = make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, product);
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    add_operation(graph, operation, "operation of a product");
}

struct Pointwise {
    cudnnPointwiseMode_t mode;
    Descriptor x, b = nullptr, t = nullptr;  // b and t only where the mode has them
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    int64_t axis = -1;  // whose index, for CUDNN_POINTWISE_GEN_INDEX
};

// y = mode(x, b, t)
Descriptor pointwise(OperationGraph& graph, const Pointwise& p, const Descriptor& y) {
    const Descriptor mode = make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(mode, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, p.mode);
    set(mode, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, p.compute);
    if (p.axis >= 0) set(mode, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, p.axis);
    finalize(mode, "pointwise mode");
    graph.kept.push_back(mode);
    const Descriptor operation = make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, mode);
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p.x);
    if (p.b != nullptr) set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p.b);
    if (p.t != nullptr) set(operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p.t);
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_operation(graph, operation, "pointwise operation");
    return y;
}

// y = x reduced over the dimensions in which y has size 1
Descriptor reduce(OperationGraph& graph, cudnnReduceTensorOp_t op, const Descriptor& x, const Descriptor& y) {
    const Descriptor reduction = make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(reduction, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
    set(reduction, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    finalize(reduction, "reduction");
    graph.kept.push_back(reduction);
    const Descriptor operation = make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction);
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(graph, operation, "operation of a reduction");
    return y;
}

// y = x with other sizes and strides, which here means transposed.
Descriptor reshape(OperationGraph& graph, const Descriptor& x, const Descriptor& y) {
    const Descriptor operation = make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(graph, operation, "transposition");
    return y;
}

// The scores, rounded to bf16, with rows and keys exchanged.
Descriptor transpose_scores(OperationGraph& graph, const Descriptor& scores) {
    const Shape& s = graph.shape;
    return reshape(graph, scores,
                   add_tensor(graph, graph.next_virtual++, CUDNN_DATA_BFLOAT16, {s.B, s.H, s.T, s.T},
                              {s.H * s.T * s.T, s.T * s.T, 1, s.T}));
}

// The causal mask.
Descriptor mask(OperationGraph& graph, const Descriptor& scores) {
    const auto index = [&](int64_t axis) {
        return pointwise(graph, {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = scores, .axis = axis},
                         add_scores(graph, CUDNN_DATA_INT32));
    };
    const Descriptor row = index(2), key = index(3);
    const Descriptor counts =
        pointwise(graph, {.mode = CUDNN_POINTWISE_CMP_GE, .x = row, .b = key, .compute = CUDNN_DATA_BOOLEAN},
                  add_scores(graph, CUDNN_DATA_BOOLEAN));
    return pointwise(graph,
                     {.mode = CUDNN_POINTWISE_BINARY_SELECT, .x = scores, .b = add_scalar(graph, kMasked), .t = counts},
                     add_scores(graph, CUDNN_DATA_FLOAT));
}

void add_forward(OperationGraph& graph) {
    const Descriptor query = add_rows(graph, kQuery, Layout::packed);
    const Descriptor key_transposed = add_rows_transposed(graph, kKey, Layout::packed);
    const Descriptor value = add_rows(graph, kValue, Layout::in_qkv), out = add_rows(graph, kOut, Layout::in_out);
    const Descriptor scores = add_scores(graph, CUDNN_DATA_FLOAT);
    multiply(graph, query, key_transposed, scores);
    const Descriptor masked = mask(graph, scores);
    const Descriptor largest = reduce(graph, CUDNN_REDUCE_TENSOR_MAX, masked, add_numbers(graph));
    const Descriptor shifted =
        pointwise(graph, {.mode = CUDNN_POINTWISE_SUB, .x = masked, .b = largest}, add_scores(graph, CUDNN_DATA_FLOAT));
    const Descriptor weights =
        pointwise(graph, {.mode = CUDNN_POINTWISE_EXP, .x = shifted}, add_scores(graph, CUDNN_DATA_FLOAT));
    const Descriptor sum = reduce(graph, CUDNN_REDUCE_TENSOR_ADD, weights, add_numbers(graph));
    const Descriptor log_sum = pointwise(graph, {.mode = CUDNN_POINTWISE_LOG, .x = sum}, add_numbers(graph));
    pointwise(graph, {.mode = CUDNN_POINTWISE_ADD, .x = largest, .b = log_sum}, add_numbers(graph, kLse));
    const Descriptor normalized =
        pointwise(graph, {.mode = CUDNN_POINTWISE_DIV, .x = weights, .b = sum}, add_scores(graph, CUDNN_DATA_BFLOAT16));
    multiply(graph, normalized, value, out);
}

void add_backward(OperationGraph& graph) {
    const Shape& s = graph.shape;
    const Descriptor query = add_rows(graph, kQuery, Layout::packed);
    const Descriptor key_transposed = add_rows_transposed(graph, kKey, Layout::packed);
    const Descriptor value_transposed = add_rows_transposed(graph, kValue, Layout::in_qkv);
    const Descriptor out = add_rows(graph, kOut, Layout::in_out), dout = add_rows(graph, kDout, Layout::in_out);
    const Descriptor dquery = add_rows(graph, kDquery, Layout::packed), dkey = add_rows(graph, kDkey, Layout::packed);
    const Descriptor dvalue = add_rows(graph, kDvalue, Layout::in_qkv), lse = add_numbers(graph, kLse);

    const Descriptor products = pointwise(
        graph, {.mode = CUDNN_POINTWISE_MUL, .x = dout, .b = out},
        add_tensor(graph, graph.next_virtual++, CUDNN_DATA_FLOAT, {s.B, s.H, s.T, s.D}, strides_of(s, Layout::in_out)));
    const Descriptor sums = reduce(graph, CUDNN_REDUCE_TENSOR_ADD, products, add_numbers(graph));
    // Times 1, where dropout would have a factor: cuDNN looks for it.
    const Descriptor delta = pointwise(graph, {.mode = CUDNN_POINTWISE_MUL, .x = sums, .b = add_scalar(graph, kOne)},
                                       add_numbers(graph, kDelta));

    const Descriptor scores = add_scores(graph, CUDNN_DATA_FLOAT);
    multiply(graph, query, key_transposed, scores);
    const Descriptor shifted =
        pointwise(graph, {.mode = CUDNN_POINTWISE_SUB, .x = scores, .b = lse}, add_scores(graph, CUDNN_DATA_FLOAT));
    const Descriptor weights =
        pointwise(graph, {.mode = CUDNN_POINTWISE_EXP, .x = mask(graph, shifted)}, add_scores(graph, CUDNN_DATA_FLOAT));
    multiply(graph, transpose_scores(graph, weights), dout, dvalue);

    const Descriptor dweights = add_scores(graph, CUDNN_DATA_FLOAT);
    multiply(graph, dout, value_transposed, dweights);
    const Descriptor centred =
        pointwise(graph, {.mode = CUDNN_POINTWISE_SUB, .x = dweights, .b = delta}, add_scores(graph, CUDNN_DATA_FLOAT));
    const Descriptor dscores = pointwise(graph, {.mode = CUDNN_POINTWISE_MUL, .x = centred, .b = weights},
                                         add_scores(graph, CUDNN_DATA_FLOAT));
    multiply(graph, transpose_scores(graph, dscores), query, dkey);
    const Descriptor key = reshape(graph, key_transposed,
                                   add_tensor(graph, graph.next_virtual++, CUDNN_DATA_BFLOAT16, {s.B, s.H, s.T, s.D},
                                              strides_of(s, Layout::packed)));
    multiply(graph, dscores, key, dquery);
}

// ---------------------------------------------------------------------------------------------------------------
// Plans

// What of a device an engine depends on: of the current one, or as JSON.
Descriptor device_description(const std::string& json) {
    const Descriptor device = make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    if (json.empty()) {
        int current = 0;
        if (cudaGetDevice(&current) != cudaSuccess) throw std::runtime_error("cuDNN: no GPU");
        set(device, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, current);
    } else {
        set_all(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, std::span<const char>(json));
    }
    finalize(device, "device");
    return device;
}

// The answer of cuDNN's heuristics to a graph: engines with their settings, the best first.
struct Query {
    OperationGraph graph;
    Descriptor device, whole, heuristics;
    int64_t count = 0;  // before cuDNN looks at each more closely
};

Query ask(const Shape& shape, const std::string& device_json) {
    Query query = {.graph = {.shape = shape, .kept = {}, .operations = {}},
                   .device = device_description(device_json),
                   .whole = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
                   .heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)};
    shape.backward ? add_backward(query.graph) : add_forward(query.graph);
    set_all(query.whole, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            std::span<const cudnnBackendDescriptor_t>(query.graph.operations));
    finalize(query.whole, "graph of attention's " + text_of(shape));
    set(query.heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, query.whole);
    set(query.heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    set(query.heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, query.device);
    finalize(query.heuristics, "engines for attention's " + text_of(shape));
    check(cudnnBackendGetAttribute(query.heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                   0, &query.count, nullptr),
          "number of engines");
    return query;
}

struct Plan {
    Query query;
    Descriptor settings, plan;
    int64_t workspace_bytes = 0;
};

Plan make_plan(const Shape& shape) {
    Plan made = {.query = ask(shape, ""), .settings = nullptr, .plan = nullptr};
    std::vector<Descriptor> settings;
    std::vector<cudnnBackendDescriptor_t> addresses;
    for (int64_t i = 0; i < made.query.count; i++) {
        settings.push_back(make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        addresses.push_back(settings.back().get());
    }
    int64_t found = 0;
    check(cudnnBackendGetAttribute(made.query.heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, made.query.count, &found, addresses.data()),
          "engines");
    if (found == 0)
        throw std::runtime_error("cuDNN " + std::to_string(cudnnGetVersion()) + " has no engine for attention's " +
                                 text_of(shape) + " on this GPU: take model.attention: fused");
    // Of the engines proposed the first of which there is a plan: some turn out not to be there.
    for (int64_t i = 0; i < found; i++) {
        made.settings = settings[static_cast<size_t>(i)];
        made.plan = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(made.plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, made.settings);
        if (cudnnBackendFinalize(made.plan.get()) == CUDNN_STATUS_SUCCESS) break;
        if (i + 1 == found) finalize(made.plan, "plan for attention's " + text_of(shape));
    }
    check(cudnnBackendGetAttribute(made.plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                   &found, &made.workspace_bytes),
          "workspace");
    return made;
}

cudnnHandle_t library() {
    static const cudnnHandle_t handle = [] {
        // Before 9.16 its backward pass was wrong for T that is no multiple of 128.
        if (cudnnGetVersion() < kOldestCudnn)
            throw std::runtime_error("cuDNN " + std::to_string(cudnnGetVersion()) + " is loaded (wanted " +
                                     std::to_string(kOldestCudnn) + " or later)");
        cudnnHandle_t made;
        check(cudnnCreate(&made), "start");
        check(cudnnSetStream(made, device_stream()), "stream");
        return made;
    }();
    return handle;
}

struct Address {
    Name name;
    const void* at;
};

void execute(const Shape& shape, const std::vector<Address>& addresses) {
    static std::map<Shape, Plan> plans;
    const cudnnHandle_t handle = library();
    auto found = plans.find(shape);
    if (found == plans.end()) found = plans.emplace(shape, make_plan(shape)).first;
    const Plan& plan = found->second;
    void* workspace = nullptr;
    try {
        if (plan.workspace_bytes > 0) workspace = device_scratch(static_cast<size_t>(plan.workspace_bytes));
    } catch (const std::bad_alloc&) {
        throw std::runtime_error("no memory for cuDNN's attention: " + std::to_string(plan.workspace_bytes >> 20) +
                                 " MiB wanted for the " + text_of(shape) + " (model.attention: fused wants none)");
    }
    std::vector<int64_t> names;
    std::vector<void*> pointers;
    for (const Address& address : addresses) {
        names.push_back(address.name);
        pointers.push_back(const_cast<void*>(address.at));
    }
    const Descriptor pack = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set_all(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const int64_t>(names));
    set_all(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::span<void* const>(pointers));
    set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
    finalize(pack, "addresses");
    check(cudnnBackendExecute(handle, plan.plan.get(), pack.get()), "attention's " + text_of(shape));
}

constexpr float kMinusInfinity = -__builtin_inff(), kUnit = 1;

// Arrays from the workspace, in whole 128 bytes as attention.cu's.
real* take(float*& workspace, int64_t values) {
    real* at = reinterpret_cast<real*>(workspace);
    workspace += (values + 63) / 64 * 32;
    return at;
}

}  // namespace

// The same workspace as attention.cu's serves: there are q, k, v and dO, in rows of D channels or more, and lse.
void attention_cudnn_forward(real* out, float* lse, const real* qkv, const RotaryTable& rotary, float* workspace,
                             int64_t B, int64_t T, int64_t H, int64_t D) {
    real* query = take(workspace, B * H * T * D);
    real* key = take(workspace, B * H * T * D);
    attention_rows(query, key, qkv, rotary, B, T, H, D);
    execute({B, T, H, D, false}, {{kQuery, query},
                                  {kKey, key},
                                  {kValue, qkv + 2 * H * D},
                                  {kOut, out},
                                  {kLse, lse},
                                  {kMasked, &kMinusInfinity}});
}

void attention_cudnn_backward(real* dqkv, const real* dout, const real* qkv, const real* out, const float* lse,
                              const RotaryTable& rotary, float* workspace, int64_t B, int64_t T, int64_t H, int64_t D) {
    real* query = take(workspace, B * H * T * D);
    real* key = take(workspace, B * H * T * D);
    real* dquery = take(workspace, B * H * T * D);
    real* dkey = take(workspace, B * H * T * D);
    const float* delta = workspace;
    attention_rows(query, key, qkv, rotary, B, T, H, D);
    execute({B, T, H, D, true}, {{kQuery, query},
                                 {kKey, key},
                                 {kValue, qkv + 2 * H * D},
                                 {kOut, out},
                                 {kLse, lse},
                                 {kDout, dout},
                                 {kDquery, dquery},
                                 {kDkey, dkey},
                                 {kDvalue, dqkv + 2 * H * D},
                                 {kDelta, delta},
                                 {kMasked, &kMinusInfinity},
                                 {kOne, &kUnit}});
    attention_rows_backward(dqkv, dquery, dkey, rotary, B, T, H, D);
}

int64_t cudnn_engine_count(const std::string& device_json, int64_t B, int64_t T, int64_t H, int64_t D, bool backward) {
    return ask({B, T, H, D, backward}, device_json).count;
}

}  // namespace jetlag
