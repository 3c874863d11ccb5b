/* rebuild.h */

struct ckv_volume;

int ckv_checkpoint_write(struct ckv_volume *volume);
