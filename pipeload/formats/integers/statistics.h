/* A scale or a zero of any kind. See byte_product.c and tile_product.c, which include this file. */

__attribute__((target("avx2,fma,f16c"))) static inline float told(const void *at, int64_t i,
                                                                  int kind)
{
    uint32_t bits;
    float made;
    if (kind == FLOAT32)
        return ((const float *)at)[i];
    if (kind == FLOAT16)
        return _cvtsh_ss(((const uint16_t *)at)[i]);
    bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    memcpy(&made, &bits, 4);
    return made;
}
