/* region.h */

struct ckv_volume;

int ckv_region_namespace(struct ckv_volume *volume, const uint8_t *tag, bool add);
