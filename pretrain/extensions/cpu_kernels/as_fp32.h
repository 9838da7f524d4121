/* The type for which the next lines are compiled: numbers in fp32. The names of the functions end with _fp32. */
#undef NUMBER
#undef TO_FLOAT
#undef FROM_FLOAT
#undef EXPONENTIAL
#undef NAMED
#define NUMBER float
#define TO_FLOAT(x) (x)
#define FROM_FLOAT(x) (x)
#define EXPONENTIAL(x) exponential_fp32(x)
#define NAMED(name) name##_fp32
