// Dense products through cuBLASLt. Its matrices are stored by columns: a matrix (rows, columns) of ours is its
// transpose there, so out = inp weight^T + bias is computed as out^T = weight inp^T, with the bias along the rows.
//
// What cuBLASLt's heuristics choose for a problem is kept with it. Float32 means float32 (no tf32 unless PRECISION asks
// for it), also for the sums of bf16 and tf32 products, and sums that are split are added up in float in a fixed order,
// so that the same inputs give the same bits.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels/cuda/blas.h"
#include "kernels/ops.h"

namespace jetlag {

// Of kernels/cuda/device.h and runtime.h, which are for kernels and nvcc.
cudaStream_t device_stream();
void* device_scratch(size_t bytes);

static void check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        throw std::runtime_error(std::string("cuBLASLt, ") + what + ": " + cublasLtGetStatusString(status));
}

// d = op(a) op(b) + beta d, by columns: op(a) is (m, k), op(b) is (k, n), d is (m, n). With transpose_a the matrix a is
// stored as (k, m), with transpose_b b as (n, k); none has gaps between its columns.
struct Product {
    int64_t m, n, k;
    bool transpose_a, transpose_b, with_bias, accumulate;
    cudaDataType_t result;  // of d; a, b and the bias are `real`
};

// What the choice of an algorithm depends on besides.
struct Alignments {
    uint32_t a, b, d;
};

struct Plan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

static constexpr size_t kWorkspaceBytes = 32 << 20;
static constexpr cudaDataType_t kReal = kHalfPrecision ? CUDA_R_16BF : CUDA_R_32F;
static constexpr cublasComputeType_t kProducts = kTf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;

static uint32_t alignment(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return static_cast<uint32_t>(std::min<uintptr_t>(256, address & -address));
}

static cublasLtHandle_t library() {
    static const cublasLtHandle_t handle = [] {
        cublasLtHandle_t made;
        check(cublasLtCreate(&made), "start");
        return made;
    }();
    return handle;
}

static Plan make_plan(const Product& p, const Alignments& alignments) {
    Plan plan;
    check(cublasLtMatmulDescCreate(&plan.operation, kProducts, CUDA_R_32F), "operation");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
        check(cublasLtMatmulDescSetAttribute(plan.operation, attribute, &value, sizeof(value)), "operation");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.with_bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    const auto layout = [](cublasLtMatrixLayout_t* made, cudaDataType_t type, int64_t rows, int64_t columns) {
        check(cublasLtMatrixLayoutCreate(made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows),
              "layout");
    };
    layout(&plan.a, kReal, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k);
    layout(&plan.b, kReal, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n);
    layout(&plan.d, p.result, p.m, p.n);

    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), "preference");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments.a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments.b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments.d);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments.d);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(library(), plan.operation, plan.a, plan.b, plan.d, plan.d, preference, 1,
                                         &result, &found),
          "choice of an algorithm");
    cublasLtMatmulPreferenceDestroy(preference);
    if (found == 0) check(CUBLAS_STATUS_NOT_SUPPORTED, "choice of an algorithm");
    plan.algorithm = result.algo;
    return plan;
}

static void multiply(void* d, const real* a, const real* b, const real* bias, const Product& p) {
    // The result's type goes with `accumulate`.
    using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, bool, bool, uint32_t, uint32_t, uint32_t>;
    static std::map<Key, Plan> plans;
    static void* const workspace = device_alloc(kWorkspaceBytes);
    const Alignments at = {alignment(a), alignment(b), alignment(d)};
    const Key key = {p.m, p.n, p.k, p.transpose_a, p.transpose_b, p.with_bias, p.accumulate, at.a, at.b, at.d};
    auto found = plans.find(key);
    if (found == plans.end()) found = plans.emplace(key, make_plan(p, at)).first;
    const Plan& plan = found->second;
    if (p.with_bias)
        check(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)),
              "bias");
    const float alpha = 1, beta = p.accumulate ? 1 : 0;
    check(cublasLtMatmul(library(), plan.operation, &alpha, a, plan.a, b, plan.b, &beta, d, plan.d, d, plan.d,
                         &plan.algorithm, workspace, kWorkspaceBytes, device_stream()),
          "product");
}

void blas_forward(real* out, const real* inp, const real* weight, const real* bias, int64_t N, int64_t C, int64_t OC) {
    // An epilogue may read the bias 16 bytes at a time, and nothing tells cuBLASLt that it lies elsewhere.
    if (const size_t bytes = static_cast<size_t>(OC) * sizeof(real); alignment(bias) < 16) {
        void* aligned = device_scratch(bytes);
        if (cudaMemcpyAsync(aligned, bias, bytes, cudaMemcpyDeviceToDevice, device_stream()) != cudaSuccess)
            throw std::runtime_error("copy of a bias");
        bias = static_cast<const real*>(aligned);
    }
    multiply(out, weight, inp, bias,
             {.m = OC,
              .n = N,
              .k = C,
              .transpose_a = true,
              .transpose_b = false,
              .with_bias = true,
              .accumulate = false,
              .result = kReal});
}

void blas_backward(real* dinp, float* dweight, const real* dout, const real* inp, const real* weight, float*, int64_t N,
                   int64_t C, int64_t OC) {
    if (dinp != nullptr)
        multiply(dinp, weight, dout, nullptr,
                 {.m = C,
                  .n = N,
                  .k = OC,
                  .transpose_a = false,
                  .transpose_b = false,
                  .with_bias = false,
                  .accumulate = false,
                  .result = kReal});
    multiply(dweight, inp, dout, nullptr,
             {.m = C,
              .n = OC,
              .k = N,
              .transpose_a = false,
              .transpose_b = true,
              .with_bias = false,
              .accumulate = true,
              .result = CUDA_R_32F});
}

int64_t blas_workspace_floats(int64_t, int64_t, int64_t) {
    return 0;
}

}  // namespace jetlag
