"""`ktrainer plan`: what a run would do, without running it or starting any other process."""
