/* plant.h - the cart-pole of the paper after the change, simulated on the device: a rod of 10 m and 1 kg on a cart. */
#ifndef PLANT_H
#define PLANT_H

enum { PLANT_RATE = 50, PLANT_SECONDS = 15 }; /* control periods a second, length of a trial */

typedef struct PlantState {
  float x, v, theta, omega; /* m, m/s, rad from the upright, rad/s */
} PlantState;

/* One control period under a force (N) that is held. */
PlantState plant_step(PlantState state, float force);

/* The force of the regulator that an expert would design for this plant: what the policy is to learn. */
float plant_expert(PlantState state);

/* Within 2.4 m and 12 degrees, as Gymnasium has it. */
int plant_balanced(PlantState state);
int plant_fallen(PlantState state);

#endif /* PLANT_H */
