/* The type for which the next lines are compiled: numbers in bf16. The functions have their plain names. */
#undef NUMBER
#undef TO_FLOAT
#undef FROM_FLOAT
#undef EXPONENTIAL
#undef NAMED
#define NUMBER uint16_t
#define TO_FLOAT(x) to_float(x)
#define FROM_FLOAT(x) to_bf16(x)
#define EXPONENTIAL(x) exponential(x)
#define NAMED(name) name
