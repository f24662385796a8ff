-- An animal clinic: written for this project.
CREATE TABLE vet (vet_id INTEGER PRIMARY KEY, name TEXT, speciality TEXT, hired INTEGER);
CREATE TABLE owner (owner_id INTEGER PRIMARY KEY, name TEXT, city TEXT, phone TEXT);
CREATE TABLE animal (animal_id INTEGER PRIMARY KEY, name TEXT, species TEXT, weight REAL, owner_id INTEGER,
  FOREIGN KEY (owner_id) REFERENCES owner(owner_id));
CREATE TABLE visit (visit_id INTEGER PRIMARY KEY, animal_id INTEGER, vet_id INTEGER, day TEXT, cost REAL, reason TEXT,
  FOREIGN KEY (animal_id) REFERENCES animal(animal_id), FOREIGN KEY (vet_id) REFERENCES vet(vet_id));
INSERT INTO vet VALUES (1,'Dr Ruiz','surgery',2009),(2,'Dr Okafor','dentistry',2014),(3,'Dr Lowe','surgery',2019),
  (4,'Dr Iverson','birds',2021);
INSERT INTO owner VALUES (1,'Nina West','Leeds','555-0101'),(2,'Paul Grey','York',NULL),(3,'Ravi Shah','Leeds','555-0144'),
  (4,'Tess Young','Hull','555-0190'),(5,'Uma Vance','York','555-0123');
INSERT INTO animal VALUES (1,'Biscuit','dog',22.5,1),(2,'Cleo','cat',4.1,1),(3,'Duke','dog',31.0,2),(4,'Echo','parrot',0.4,3),
  (5,'Fig','cat',5.0,3),(6,'Gus','dog',9.8,4),(7,'Hazel','rabbit',2.2,4),(8,'Ivy','cat',NULL,5),(9,'Jet','dog',22.5,5);
INSERT INTO visit VALUES
  (1,1,1,'2024-01-10',120.0,'operation'),(2,1,2,'2024-02-02',60.0,'teeth'),(3,2,2,'2024-02-14',55.0,'teeth'),
  (4,3,1,'2024-02-20',310.0,'operation'),(5,4,4,'2024-03-01',40.0,'check'),(6,6,3,'2024-03-04',95.0,'check'),
  (7,7,3,'2024-03-15',48.5,'vaccine'),(8,3,2,'2024-04-09',60.0,'teeth'),(9,9,1,'2024-04-11',150.0,'operation'),
  (10,5,3,'2024-05-06',48.5,'vaccine');
