"""HTTP at the door: read strictly, judged, handled, and written anew to where it goes."""
