/* Hides AVX-512, VNNI and AMX from a process (LD_PRELOAD), so that libraries which ask CPUID choose
 * their AVX2 kernels. Uses CPUID faulting: arch_prctl(ARCH_CPUID, 0) makes the instruction raise
 * SIGSEGV, and the handler answers in its place. x86-64 Linux on a processor with cpuid_fault. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static long let_cpuid_run(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void mask(uint32_t leaf, uint32_t sub, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (leaf == 7 && sub == 0) {
        /* AVX512 F DQ IFMA PF ER CD BW VL */
        *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        /* AVX512 VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
        *c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        /* AVX512 4VNNIW 4FMAPS VP2INTERSECT FP16, AMX BF16 TILE INT8 */
        *d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));
    }
    if (leaf == 7 && sub == 1) {
        *a &= ~(BIT(4) | BIT(5) | BIT(21)); /* AVX-VNNI, AVX512-BF16, AMX-FP16 */
        *d = 0;                             /* AVX-VNNI-INT8 and later */
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    uint32_t leaf = (uint32_t)registers[REG_RAX], sub = (uint32_t)registers[REG_RCX], a, b, c, d;
    (void)info;
    if (code[0] != 0x0f || code[1] != 0xa2) { /* a fault of its own: let it happen */
        signal(number, SIG_DFL);
        return;
    }
    let_cpuid_run(1);
    __cpuid_count(leaf, sub, a, b, c, d);
    let_cpuid_run(0);
    mask(leaf, sub, &a, &b, &c, &d);
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, 0);
    if (let_cpuid_run(0) != 0) _exit(77); /* no CPUID faulting here */
}
