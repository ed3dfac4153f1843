/* @name@_state.c - what the head knows at the start: configuration and state, the bytes of head.kbt.
 * @made@
 */
extern const unsigned char @name@_state[@state_bytes@];
const unsigned char @name@_state[@state_bytes@] = {
@state_array@};
