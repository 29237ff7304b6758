from experiments.pathfinder.parameters import Parameters

OTHER = Parameters(
    **{"size": 96, "dash_length": 4, "margins": (1, 2, 4), "thickness": 1.5, "marker_radius": 2.0, "seed_distance": 10},
    **{"padding": 5, "continuity": 1.4, "target_contrast": 0.7, "distractor_contrast": 1.2, "distractors": 9},
    **{"contour_length": 5, "distractor_length": 1},
)
